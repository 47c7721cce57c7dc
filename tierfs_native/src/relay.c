/* One engine after another: the sockets to it, and the threads that use them. */
#define _GNU_SOURCE
#include "relay.h"

#include "log.h"
#include "relay_answer.h"
#include "relay_send.h"
#include "relay_state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SOCKET_BUFFER_BYTES (4 * 1024 * 1024)

static int start_thread(void *(*function)(void *), struct tierfs_relay *relay)
{
    pthread_t thread;
    int error = pthread_create(&thread, NULL, function, relay);

    if (error != 0)
        return -error;
    pthread_detach(thread);
    return 0;
}

int tierfs_relay_create(const struct tierfs_relay_links *links, struct tierfs_relay **relay)
{
    struct tierfs_relay *made = calloc(1, sizeof *made);
    int result;

    if (made == NULL)
        return -ENOMEM;
    made->links = *links;
    made->socket = made->channel = made->names = -1;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    made->answer = aligned_alloc(4096, TIERFS_MESSAGE_MAX_BYTES);
    made->names_answer = malloc(TIERFS_NAMES_MAX_BYTES);
    if (made->answer == NULL || made->names_answer == NULL)
        return -ENOMEM;
    *relay = made;
    result = tierfs_notifications_create(tierfs_relay_tell_unknown, made, &made->notifications);
    if (result == 0)
        result = start_thread(tierfs_relay_send_thread, made);
    if (result == 0)
        result = start_thread(tierfs_relay_answers_thread, made);
    if (result == 0)
        result = start_thread(tierfs_relay_names_thread, made);
    return result;
}

void tierfs_relay_set_device(struct tierfs_relay *relay, int device)
{
    tierfs_notifications_set_device(relay->notifications, device);
}

void tierfs_relay_takes_places(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->takes_places = true;
    pthread_mutex_unlock(&relay->lock);
}

void tierfs_relay_lists_plainly(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->lists_plainly = true;
    pthread_mutex_unlock(&relay->lock);
}

void tierfs_relay_closes_untold(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->closes_untold = true;
    pthread_mutex_unlock(&relay->lock);
}

void tierfs_relay_truncates_apart(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->truncates_apart = true;
    pthread_mutex_unlock(&relay->lock);
}

void tierfs_relay_connect(struct tierfs_relay *relay, int socket, int channel, int names)
{
    int bytes = SOCKET_BUFFER_BYTES;
    int own = fcntl(channel, F_DUPFD_CLOEXEC, 0);

    if (own < 0)
        tierfs_error("the channel cannot be shared  reason=\"%s\"", strerror(errno));
    /* A WRITE of 1 MiB is one packet; more than the administrator's limit needs CAP_NET_ADMIN. */
    if (setsockopt(socket, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes) < 0)
        tierfs_warning("the socket to the engine stays small  reason=\"%s\"", strerror(errno));
    pthread_mutex_lock(&relay->lock);
    while (relay->socket >= 0) /* the end of the engine before has not been seen yet */
        pthread_cond_wait(&relay->changed, &relay->lock);
    relay->socket = socket;
    relay->channel = own;
    relay->names = names;
    relay->has_names = relay->has_names || names >= 0;
    relay->names_ended = false;
    relay->answered = 0;
    pthread_cond_broadcast(&relay->changed);
    pthread_mutex_unlock(&relay->lock);
}

void tierfs_relay_attach(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    if (relay->socket >= 0) {
        if (relay->initialised) {
            relay->replaying = true;
            if (send(relay->socket, relay->init, relay->init_bytes, MSG_NOSIGNAL) < 0)
                tierfs_warning("INIT was not repeated  reason=\"%s\"", strerror(errno));
        } else {
            relay->attached = true;
        }
        pthread_cond_broadcast(&relay->changed);
    }
    pthread_mutex_unlock(&relay->lock);
}

void tierfs_relay_engine_ended(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    relay->attached = relay->replaying = false;
    /* Wakes who still sends. The number of the descriptor must not mean another file before they are through. */
    (void)shutdown(relay->socket, SHUT_RDWR);
    if (relay->names >= 0)
        (void)shutdown(relay->names, SHUT_RDWR);
    /* What has been answered about names is read to its end: it must not be repeated. */
    while (relay->senders != 0 || (relay->names >= 0 && !relay->names_ended))
        pthread_cond_wait(&relay->changed, &relay->lock);
    close(relay->socket);
    close(relay->channel);
    if (relay->names >= 0)
        close(relay->names);
    relay->socket = relay->channel = relay->names = -1;
    tierfs_pending_rewind(&relay->pending);
    pthread_cond_broadcast(&relay->changed);
    pthread_mutex_unlock(&relay->lock);
}

void tierfs_relay_counts(struct tierfs_relay *relay, struct tierfs_counts *counts)
{
    pthread_mutex_lock(&relay->lock);
    counts->relayed = relay->relayed;
    counts->repeated = relay->repeated;
    counts->pending = (uint32_t)relay->pending.count;
    counts->placed = relay->placed;
    pthread_mutex_unlock(&relay->lock);
    tierfs_notifications_counts(relay->notifications, &counts->notifications, &counts->notifications_refused);
}

uint64_t tierfs_relay_answered(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    uint64_t answered = relay->answered;
    pthread_mutex_unlock(&relay->lock);
    return answered;
}
