#define _GNU_SOURCE
#include "front_transport.h"

#include "front_dispatch.h"
#include "log.h"
#include "messages.h"

#include <errno.h>
#include <string.h>
#include <sys/mount.h>

int tierfs_front_mount(struct tierfs_front *front, const struct tierfs_packet *packet)
{
    const struct tierfs_device_links links = {
        .handle = tierfs_front_handle_request, .context = front, .gone = front->gone};
    struct tierfs_mount_message said;
    int result = tierfs_message_mount(packet->body, packet->header.body_bytes, &said);

    if (result == 0)
        result = front->device == NULL
                     ? tierfs_device_mount(&links, said.mountpoint, said.name, said.options,
                                           (unsigned long)packet->header.value, &front->device)
                     : -EINVAL;
    if (result < 0)
        return result;
    front->mounted = true;
    tierfs_backing_set_device(front->backing, tierfs_device_descriptor(front->device));
    tierfs_relay_set_device(front->relay, tierfs_device_descriptor(front->device));
    tierfs_relay_attach(front->relay);
    result = tierfs_device_start(front->device, front->workers);
    if (result < 0)
        (void)tierfs_device_unmount(front->device, MNT_DETACH);
    return result;
}

bool tierfs_front_prepare_ring(void *context, bool is_offered, size_t payload_bytes)
{
    struct tierfs_front *front = context;
    const struct tierfs_uring_links links = {.answer = tierfs_front_answer_from_ring, .context = front};
    struct tierfs_uring *uring = NULL;
    int result;

    if (!front->wants_ring)
        return false;
    result = is_offered
                 ? tierfs_uring_create(&links, tierfs_device_descriptor(front->device), payload_bytes, &uring)
                 : -EOPNOTSUPP;
    atomic_store(&front->ring_errno, -result);
    if (result < 0)
        tierfs_warning("requests come through /dev/fuse, not through io_uring  reason=\"%s\"",
                       is_offered ? strerror(-result) : "the kernel does not offer it");
    atomic_store_explicit(&front->uring, uring, memory_order_release);
    return uring != NULL;
}

void tierfs_front_begin_ring(void *context)
{
    struct tierfs_front *front = context;
    struct tierfs_uring *uring = atomic_load_explicit(&front->uring, memory_order_acquire);

    if (uring == NULL)
        return;
    tierfs_uring_begin(uring);
    tierfs_info("requests come through io_uring  depth=%u", tierfs_uring_depth_of(uring));
}
