#define _GNU_SOURCE
#include "relay_answer.h"

#include "fuse_init.h"
#include "log.h"
#include "placed.h"
#include "relay_open.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#define EXTRA_REPLY_MAX_BYTES 16384u

void tierfs_relay_answer_error(const struct tierfs_origin *origin, uint64_t unique, int error)
{
    struct fuse_out_header header = {.len = sizeof header, .error = -error, .unique = unique};
    int result = origin != NULL ? tierfs_origin_answer(origin, &header, sizeof header) : 0;

    if (result < 0 && result != -ENOENT && result != -ENODEV)
        tierfs_warning("an answer was not taken  reason=\"%s\"", strerror(-result));
}

/*
 * Gives the kernel its answer. Requests that go to pyfuse3 are taken out by one thread alone, those about names by
 * another, and those that go on the channel by one thread at a time: the message stays where it is until then.
 */
static void finish(struct tierfs_relay *relay, struct tierfs_request *request, struct fuse_out_header *header,
                   size_t bytes)
{
    struct tierfs_handle handle = {0};
    bool opened = false;
    const struct tierfs_origin *origin = request->origin;
    uint32_t opcode = ((const struct fuse_in_header *)(const void *)request->message)->opcode;

    if (opcode == FUSE_OPEN || opcode == FUSE_OPENDIR || opcode == FUSE_CREATE || opcode == FUSE_TMPFILE)
        opened = tierfs_relay_open_answered(relay, request, header, bytes, &handle);
    int error = origin != NULL ? -tierfs_origin_answer(origin, header, bytes) : 0;
    pthread_mutex_lock(&relay->lock);
    relay->answered++;
    tierfs_pending_remove(&relay->pending, request);
    pthread_cond_broadcast(&relay->changed);
    pthread_mutex_unlock(&relay->lock);
    if (error == 0 && opcode == FUSE_INIT && relay->links.begin_ring != NULL)
        relay->links.begin_ring(relay->links.context);
    if (error == 0)
        return;
    if (opened)
        tierfs_relay_open_undo(relay, &handle, header->unique);
    if (error != ENOENT && error != ENODEV) {
        tierfs_warning("an answer was not taken  opcode=%u bytes=%zu reason=\"%s\"", opcode, bytes,
                       strerror(error));
        tierfs_relay_answer_error(origin, header->unique, EIO);
    }
}

/*
 * An answer to READ that says where the bytes are: puts them in its place, and returns the size of the answer. If they
 * are not there any more the engine is asked for the bytes themselves, and 0 is returned. In any other case: bytes.
 */
static size_t fetch_placed(struct tierfs_relay *relay, struct tierfs_request *request,
                           struct fuse_out_header *header, size_t bytes)
{
    struct fuse_read_in *asked = (void *)(request->message + sizeof(struct fuse_in_header));
    char *body = (char *)(header + 1);

    if (header->error != 0 || (asked->fh & TIERFS_FH_PLACES) == 0 || relay->links.read_placed == NULL)
        return bytes;
    long result =
        relay->links.read_placed(relay->links.context, body, bytes - sizeof *header, body, asked->size);
    if (result == TIERFS_NOT_PLACED)
        return bytes;
    pthread_mutex_lock(&relay->lock);
    if (result >= 0) {
        relay->placed++;
        pthread_mutex_unlock(&relay->lock);
        header->len = (uint32_t)(sizeof *header + (size_t)result);
        return header->len;
    }
    asked->fh &= ~TIERFS_FH_PLACES;
    if (request->sending) {
        request->again = true; /* who sends it has not seen yet that it is through */
    } else {
        request->was_sent = false; /* no engine has died */
        tierfs_pending_sent(&relay->pending, request, false);
        pthread_cond_broadcast(&relay->changed);
    }
    pthread_mutex_unlock(&relay->lock);
    return 0;
}

/* Under the lock. */
static void amend_init(const struct tierfs_relay *relay, struct fuse_out_header *header, size_t bytes)
{
    const struct tierfs_init_terms terms = {.socket = relay->socket,
                                            .lists_plainly = relay->lists_plainly,
                                            .truncates_apart = relay->truncates_apart,
                                            .prepare_ring = relay->links.prepare_ring,
                                            .context = relay->links.context};

    tierfs_init_amend(&terms, (const void *)(relay->init + sizeof(struct fuse_in_header)), header, bytes);
}

static void forward_answer(struct tierfs_relay *relay, size_t bytes)
{
    struct fuse_out_header *header = (void *)relay->answer;

    pthread_mutex_lock(&relay->lock);
    if (relay->replaying && header->unique == relay->init_unique) {
        relay->replaying = false;
        relay->attached = true;
        pthread_cond_broadcast(&relay->changed);
        pthread_mutex_unlock(&relay->lock);
        return;
    }
    struct tierfs_request *request = tierfs_pending_find(&relay->pending, header->unique);
    if (request == NULL || request->extra || request->names || request->unanswered) {
        pthread_mutex_unlock(&relay->lock);
        return; /* the engine has answered what an earlier one had answered */
    }
    const struct fuse_in_header *asked = (const void *)request->message;
    if (asked->opcode == FUSE_INIT) {
        amend_init(relay, header, bytes);
        relay->initialised = true;
    }
    pthread_mutex_unlock(&relay->lock);
    if (asked->opcode == FUSE_READ)
        bytes = fetch_placed(relay, request, header, bytes);
    if (bytes == 0)
        return;
    finish(relay, request, header, bytes);
}

void *tierfs_relay_answers_thread(void *context)
{
    struct tierfs_relay *relay = context;

    for (;;) {
        pthread_mutex_lock(&relay->lock);
        while (relay->socket < 0)
            pthread_cond_wait(&relay->changed, &relay->lock);
        int socket = relay->socket;
        pthread_mutex_unlock(&relay->lock);
        ssize_t bytes;
        do
            bytes = recv(socket, relay->answer, TIERFS_MESSAGE_MAX_BYTES, 0);
        while (bytes < 0 && errno == EINTR);
        if (bytes >= (ssize_t)sizeof(struct fuse_out_header)) {
            if (((const struct fuse_out_header *)(const void *)relay->answer)->unique == 0)
                tierfs_notifications_queue(relay->notifications, relay->answer, (size_t)bytes);
            else
                forward_answer(relay, (size_t)bytes);
            continue;
        }
        tierfs_relay_engine_ended(relay);
    }
    return NULL;
}

void tierfs_relay_extra_reply(struct tierfs_relay *relay, uint64_t unique, const void *body, size_t bytes)
{
    struct {
        struct fuse_out_header header;
        char body[EXTRA_REPLY_MAX_BYTES];
    } answer = {.header.unique = unique};

    answer.header.len = sizeof answer.header;
    if (bytes < sizeof answer.header.error || bytes - sizeof answer.header.error > sizeof answer.body) {
        tierfs_error("the engine's answer has a wrong size  bytes=%zu", bytes);
        answer.header.error = -EIO;
    } else {
        memcpy(&answer.header.error, body, sizeof answer.header.error);
        bytes -= sizeof answer.header.error;
        memcpy(answer.body, (const char *)body + sizeof answer.header.error, bytes);
        answer.header.len += (uint32_t)bytes;
    }
    pthread_mutex_lock(&relay->lock);
    struct tierfs_request *request = tierfs_pending_find(&relay->pending, unique);
    if (request != NULL && !request->extra)
        request = NULL; /* another thread takes it out, at any time from here on */
    pthread_mutex_unlock(&relay->lock);
    if (request != NULL)
        finish(relay, request, &answer.header, answer.header.len);
}

/* Answers about names: several in one packet, each with its length. */
static void forward_names(struct tierfs_relay *relay, size_t bytes)
{
    for (size_t position = 0; bytes - position >= sizeof(struct fuse_out_header);) {
        struct fuse_out_header *header = (void *)(relay->names_answer + position);
        size_t length = header->len;
        if (length < sizeof *header || length > bytes - position) {
            tierfs_error("the engine's answers have a wrong size  bytes=%zu", bytes);
            return;
        }
        pthread_mutex_lock(&relay->lock);
        struct tierfs_request *request = tierfs_pending_find(&relay->pending, header->unique);
        if (request != NULL && (!request->names || request->unanswered))
            request = NULL; /* another thread takes it out, at any time from here on */
        pthread_mutex_unlock(&relay->lock);
        if (request != NULL)
            finish(relay, request, header, length);
        position += (length + 7) & ~(size_t)7;
        if (position > bytes)
            return;
    }
}

void *tierfs_relay_names_thread(void *context)
{
    struct tierfs_relay *relay = context;

    for (;;) {
        pthread_mutex_lock(&relay->lock);
        while (relay->names < 0 || relay->names_ended)
            pthread_cond_wait(&relay->changed, &relay->lock);
        int socket = relay->names;
        pthread_mutex_unlock(&relay->lock);
        ssize_t bytes;
        while ((bytes = recv(socket, relay->names_answer, TIERFS_NAMES_MAX_BYTES, 0)) > 0 ||
               (bytes < 0 && errno == EINTR))
            if (bytes > 0)
                forward_names(relay, (size_t)bytes);
        pthread_mutex_lock(&relay->lock);
        relay->names_ended = true;
        pthread_cond_broadcast(&relay->changed);
        pthread_mutex_unlock(&relay->lock);
    }
    return NULL;
}
