#define _GNU_SOURCE
#include "front_commands.h"

#include "front_channel.h"
#include "front_serving.h"
#include "front_transport.h"
#include "log.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

static void tell_counts(struct tierfs_front *front)
{
    struct tierfs_counts counts = {.answered = atomic_load(&front->answered)};
    int refusal = 0;

    counts.passthrough_opens = tierfs_backing_opens(front->backing, &refusal);
    counts.passthrough_errno = (uint32_t)refusal;
    counts.opened_here = tierfs_backing_count_here(front->backing);
    counts.no_open = front->noopen != NULL && tierfs_noopen_has_begun(front->noopen);
    struct tierfs_uring *uring = atomic_load_explicit(&front->uring, memory_order_acquire);
    int ring = uring != NULL ? tierfs_uring_state(uring) : 0;
    counts.ring = ring == 1;
    counts.ring_errno = (uint32_t)(ring < 0 ? -ring : atomic_load(&front->ring_errno));
    counts.ring_depth = uring != NULL ? tierfs_uring_depth_of(uring) : 0;
    counts.ring_requests = uring != NULL ? tierfs_uring_requests(uring) : 0;
    tierfs_relay_counts(front->relay, &counts);
    tierfs_front_tell(front, TIERFS_COUNTS, 0, &counts, sizeof counts);
}

static void handle_packet(struct tierfs_front *front, const struct tierfs_packet *packet)
{
    int result;

    switch (packet->header.kind) {
    case TIERFS_MOUNT:
        result = tierfs_front_mount(front, packet);
        tierfs_front_tell(front, TIERFS_MOUNTED, (uint64_t)-result, NULL, 0);
        break;
    case TIERFS_ATTACH:
        tierfs_relay_attach(front->relay);
        break;
    case TIERFS_UNMOUNT:
        result = front->device != NULL ? tierfs_device_unmount(front->device, (int)packet->header.value) : 0;
        front->mounted = front->mounted && result < 0;
        tierfs_front_tell(front, TIERFS_UNMOUNTED, (uint64_t)-result, NULL, 0);
        break;
    case TIERFS_VIEW:
        tierfs_front_begin_serving(front, packet);
        break;
    case TIERFS_READY:
        front->ready = true;
        front->ready_at_ms = tierfs_now_ms();
        if (front->stop_asked > 0)
            kill(front->engine.pid, SIGTERM);
        break;
    case TIERFS_STOPPING:
        front->stopping = true;
        break;
    case TIERFS_COUNT:
        tell_counts(front);
        break;
    case TIERFS_HOLD:
        atomic_store(&front->holds_writers, packet->header.value != 0);
        break;
    default:
        tierfs_warning("a message of the engine is not understood  kind=%u", packet->header.kind);
    }
    if (packet->descriptor >= 0)
        close(packet->descriptor);
}

void tierfs_front_handle_packets(struct tierfs_front *front)
{
    for (struct tierfs_queued_packet *queued; (queued = tierfs_front_next_packet(front)) != NULL;
         free(queued))
        handle_packet(front, &queued->packet);
}
