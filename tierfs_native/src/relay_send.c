#define _GNU_SOURCE
#include "relay_send.h"

#include "log.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define UNKNOWN_TRIES 5000u
#define UNKNOWN_PAUSE_NS 1000000

void tierfs_relay_send_interrupt(struct tierfs_relay *relay, const struct tierfs_request *meant)
{
    struct {
        struct fuse_in_header header;
        struct fuse_interrupt_in interrupt;
    } message = {0};
    int error = 0;

    message.header.len = sizeof message;
    message.header.opcode = FUSE_INTERRUPT;
    message.header.unique = meant->unique | 1; /* as the kernel numbers them */
    message.interrupt.unique = meant->unique;
    if (meant->names)
        return; /* it is answered as soon as it is committed */
    /* Without waiting: this may be a thread that others wait for. */
    if (meant->extra)
        error = -tierfs_channel_send(relay->channel, TIERFS_EXTRA_INTERRUPT, meant->unique, NULL, 0,
                                     MSG_DONTWAIT);
    else if (send(relay->socket, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
        error = errno;
    if (error != 0 && error != EAGAIN && error != EPIPE && error != ECONNRESET)
        tierfs_warning("an interrupt was lost  reason=\"%s\"", strerror(error));
}

int tierfs_relay_send(struct tierfs_relay *relay, struct tierfs_request *request, int flags)
{
    int socket = request->names ? relay->names : relay->socket;
    int channel = relay->channel;
    int result = 0;

    request->sending = true;
    relay->senders++;
    if (request->was_sent)
        relay->repeated++;
    pthread_mutex_unlock(&relay->lock);
    if (request->extra)
        result = tierfs_channel_send(channel, TIERFS_EXTRA, 0, request->message, request->bytes, flags);
    else if (send(socket, request->message, request->bytes, MSG_NOSIGNAL | flags) < 0)
        result = -errno;
    pthread_mutex_lock(&relay->lock);
    if (result == 0 && request->interrupted && !request->answered)
        tierfs_relay_send_interrupt(relay, request);
    bool again = request->again;
    tierfs_pending_sent(&relay->pending, request, result == 0);
    if (--relay->senders == 0 || again)
        pthread_cond_broadcast(&relay->changed);
    return result;
}

void *tierfs_relay_send_thread(void *context)
{
    struct tierfs_relay *relay = context;

    pthread_mutex_lock(&relay->lock);
    for (;;) {
        while (!relay->attached || relay->pending.unsent == NULL)
            pthread_cond_wait(&relay->changed, &relay->lock);
        struct tierfs_request *request = relay->pending.unsent;
        relay->pending.unsent = request->later;
        bool unanswered = request->unanswered;
        int result = tierfs_relay_send(relay, request, 0);
        if (result == 0 && unanswered)
            tierfs_pending_remove(&relay->pending, request);
        if (result < 0)
            relay->attached = false; /* it is dying: the thread that gets the answers sees the end soon */
    }
    return NULL;
}

void tierfs_relay_tell_unknown(void *context, uint64_t ino)
{
    struct tierfs_relay *relay = context;
    const struct timespec pause = {.tv_nsec = UNKNOWN_PAUSE_NS};

    for (unsigned tries = 0; tries < UNKNOWN_TRIES; tries++) {
        pthread_mutex_lock(&relay->lock);
        int result = relay->channel < 0
                         ? -EPIPE
                         : tierfs_channel_send(relay->channel, TIERFS_UNKNOWN, ino, NULL, 0, MSG_DONTWAIT);
        pthread_mutex_unlock(&relay->lock);
        if (result != -EAGAIN)
            return;
        nanosleep(&pause, NULL);
    }
}
