#define _GNU_SOURCE
#include "front_channel.h"

#include "log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void wake(int eventfd)
{
    uint64_t one = 1;

    if (write(eventfd, &one, sizeof one) < 0)
        tierfs_warning("an event was lost  reason=\"%s\"", strerror(errno));
}

bool tierfs_front_take_packets(struct tierfs_front *front)
{
    bool open = true;

    pthread_mutex_lock(&front->channel_lock);
    while (front->engine.channel >= 0) {
        struct tierfs_queued_packet *queued = malloc(sizeof *queued);
        if (queued == NULL)
            break;
        int result = tierfs_channel_receive(front->engine.channel, &queued->packet, MSG_DONTWAIT);
        if (result == 1 && queued->packet.header.kind == TIERFS_BACKING) {
            if (queued->packet.descriptor >= 0)
                tierfs_backing_lend(front->backing, queued->packet.header.value, queued->packet.descriptor);
            free(queued);
            continue;
        }
        if (result == 1 && queued->packet.header.kind == TIERFS_EXTRA_REPLY) {
            tierfs_relay_extra_reply(front->relay, queued->packet.header.value, queued->packet.body,
                                     queued->packet.header.body_bytes);
            if (queued->packet.descriptor >= 0)
                close(queued->packet.descriptor);
            free(queued);
            continue;
        }
        if (result == 1) {
            queued->next = NULL;
            *front->packets_end = queued;
            front->packets_end = &queued->next;
            wake(front->woken);
            continue;
        }
        free(queued);
        if (result == -EPROTO)
            tierfs_error("the engine speaks another version on the channel");
        open = result == -EAGAIN;
        break;
    }
    pthread_mutex_unlock(&front->channel_lock);
    return open;
}

struct tierfs_queued_packet *tierfs_front_next_packet(struct tierfs_front *front)
{
    pthread_mutex_lock(&front->channel_lock);
    struct tierfs_queued_packet *queued = front->packets;
    if (queued != NULL) {
        front->packets = queued->next;
        if (front->packets == NULL)
            front->packets_end = &front->packets;
    }
    pthread_mutex_unlock(&front->channel_lock);
    return queued;
}

void tierfs_front_tell(struct tierfs_front *front, uint16_t kind, uint64_t value, const void *body,
                       size_t bytes)
{
    int channel = front->engine.channel;
    int result = channel >= 0 ? tierfs_channel_send(channel, kind, value, body, bytes, 0) : 0;

    if (result < 0 && result != -EPIPE && result != -ECONNRESET)
        tierfs_warning("the engine was not told  kind=%u reason=\"%s\"", kind, strerror(-result));
}

void tierfs_front_tell_touched(void *context)
{
    struct tierfs_front *front = context;
    uint64_t inos[TIERFS_SMALL_TOUCHED];

    pthread_mutex_lock(&front->channel_lock);
    size_t count = tierfs_small_touched(front->small, inos);
    if (count != 0 && front->engine.channel >= 0)
        (void)tierfs_channel_send(front->engine.channel, TIERFS_TOUCHED, 0, inos, count * sizeof inos[0],
                                  MSG_DONTWAIT);
    pthread_mutex_unlock(&front->channel_lock);
}
