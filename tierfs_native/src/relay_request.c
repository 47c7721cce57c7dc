/* Requests of the kernel: kept, and sent to the engine if that needs no waiting. The contract is that of relay.h. */
#define _GNU_SOURCE
#include "relay.h"

#include "answer.h"
#include "log.h"
#include "placed.h"
#include "relay_answer.h"
#include "relay_opcodes.h"
#include "relay_open.h"
#include "relay_send.h"
#include "relay_state.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#define PENDING_MAX_BYTES (512u * 1024u * 1024u)

/* Under the lock. The next engine has to know as well, should this one die. */
static void note_interrupt(struct tierfs_relay *relay, const struct fuse_in_header *header)
{
    const struct fuse_interrupt_in *interrupt = (const void *)(header + 1);
    struct tierfs_request *meant = tierfs_pending_find(&relay->pending, interrupt->unique);

    if (meant == NULL)
        return;
    meant->interrupted = true;
    if (relay->attached && meant->sent)
        tierfs_relay_send_interrupt(relay, meant);
}

/*
 * Under the lock. What the engine does not answer is kept until it has been sent: it keeps what a nameless inode needs
 * for as long as the kernel knows it (FORGET), and a file for as long as it is open (RELEASE; names: to the thread that
 * commits, which puts it behind the CREATE). Should it get lost with an engine, the next one does not need it.
 */
static void pass_on(struct tierfs_relay *relay, const struct fuse_in_header *header, size_t bytes, bool names)
{
    /* Without waiting: this may be a thread that others wait for. */
    if (relay->attached && relay->pending.unsent == NULL &&
        send(names ? relay->names : relay->socket, header, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
        return;
    struct tierfs_request *request = tierfs_pending_add(&relay->pending, header->unique, header, bytes, NULL);
    if (request == NULL) {
        tierfs_warning("no memory for a message to the engine  opcode=%u", header->opcode);
        return;
    }
    request->unanswered = true;
    request->names = names;
    pthread_cond_broadcast(&relay->changed);
}

/* Of what the engine has opened, and is large. */
static void offer_places(struct tierfs_request *request)
{
    struct fuse_read_in *read = (void *)(request->message + sizeof(struct fuse_in_header));

    if ((read->fh & TIERFS_FH_FRONT) == 0 && read->size >= TIERFS_PLACE_LEAST_BYTES)
        read->fh |= TIERFS_FH_PLACES;
}

void tierfs_relay_request(struct tierfs_relay *relay, const void *message, size_t bytes,
                          const struct tierfs_origin *origin)
{
    const struct fuse_in_header *header = message;

    if (bytes < sizeof *header)
        return; /* never sent by a kernel; there is no number to answer to */
    if (bytes - sizeof *header < tierfs_opcode_body_needed(header->opcode) ||
        (tierfs_opcode_is_extra(header->opcode) && bytes > TIERFS_CHANNEL_MAX_BYTES)) {
        if (!tierfs_opcode_has_no_answer(header->opcode))
            tierfs_relay_answer_error(origin, header->unique, EINVAL);
        return;
    }
    if (header->opcode == FUSE_RELEASE || header->opcode == FUSE_RELEASEDIR)
        tierfs_relay_open_released(relay, header);
    int passed = header->opcode == FUSE_OPEN ? tierfs_relay_open_begins(relay, header) : 0;
    if (passed < 0) {
        tierfs_relay_answer_error(origin, header->unique, -passed);
        return;
    }
    pthread_mutex_lock(&relay->lock);
    relay->relayed++;
    if (tierfs_opcode_has_no_answer(header->opcode)) {
        if (header->opcode == FUSE_INTERRUPT)
            note_interrupt(relay, header);
        else
            pass_on(relay, header, bytes, false);
        pthread_mutex_unlock(&relay->lock);
        return;
    }
    if (header->opcode == FUSE_RELEASE && relay->has_names) {
        pass_on(relay, header, bytes, true);
        pthread_mutex_unlock(&relay->lock);
        tierfs_relay_answer_error(origin, header->unique, 0); /* close(2) has returned long ago */
        return;
    }
    while (relay->pending.bytes > PENDING_MAX_BYTES && bytes > 4096)
        pthread_cond_wait(&relay->changed, &relay->lock);
    struct tierfs_request *request =
        tierfs_pending_add(&relay->pending, header->unique, message, bytes, origin);
    if (request == NULL) {
        pthread_mutex_unlock(&relay->lock);
        if (header->opcode == FUSE_OPEN)
            tierfs_relay_open_failed(relay, header);
        tierfs_relay_answer_error(origin, header->unique, ENOMEM);
        return;
    }
    struct fuse_in_header *copy = (void *)request->message;
    request->extra = tierfs_opcode_is_extra(header->opcode);
    request->names = relay->has_names && tierfs_opcode_is_about_names(header->opcode);
    if (tierfs_opcode_changes_names(header->opcode)) {
        if (++relay->last_token > INT32_MAX)
            relay->last_token = 1;
        copy->pid = relay->last_token;
    }
    if (header->opcode == FUSE_OPEN)
        tierfs_relay_open_mark(request, passed > 0);
    if (header->opcode == FUSE_READ && relay->takes_places)
        offer_places(request);
    if (header->opcode == FUSE_INIT) {
        memcpy(relay->init, message, sizeof relay->init);
        relay->init_bytes = sizeof relay->init;
        relay->init_unique = header->unique;
    }
    if (relay->attached && relay->pending.unsent == request) {
        relay->pending.unsent = NULL;
        if (tierfs_relay_send(relay, request, MSG_DONTWAIT) < 0)
            pthread_cond_broadcast(&relay->changed);
    } else {
        pthread_cond_broadcast(&relay->changed);
    }
    pthread_mutex_unlock(&relay->lock);
}
