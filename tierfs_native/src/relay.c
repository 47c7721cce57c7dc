#define _GNU_SOURCE
#include "relay.h"

#include "answer.h"
#include "log.h"
#include "pending.h"
#include "placed.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MESSAGE_MAX_BYTES (1024u * 1024u + 64u * 1024u)
#define PENDING_MAX_BYTES (512u * 1024u * 1024u)
#define NOTICES_MAX 100000u
#define SOCKET_BUFFER_BYTES (4 * 1024 * 1024)
#define EXTRA_REPLY_MAX_BYTES 16384u
#define NAMES_MAX_BYTES 65536u
#define UNKNOWN_TRIES 5000u
#define UNKNOWN_PAUSE_NS 1000000

struct notice {
    struct notice *next;
    size_t bytes;
    char message[];
};

struct tierfs_relay {
    struct tierfs_relay_links links;
    pthread_mutex_t lock; /* guards all below but notices */
    pthread_cond_t changed;
    struct tierfs_pending pending;
    int device;
    int socket;      /* to the engine, or -1 */
    int channel;     /* likewise, for what pyfuse3 does not know */
    int names;       /* likewise, for names of files */
    bool has_names;
    bool names_ended; /* all that came from there has been read */
    unsigned senders; /* threads that are sending on it with the lock given up; it is closed after them */
    bool attached;   /* it takes requests */
    bool initialised; /* the kernel has its answer to INIT */
    bool lists_plainly;
    bool closes_untold;
    bool takes_places;
    bool truncates_apart;
    bool replaying;  /* an INIT was sent again; its answer is to be swallowed */
    uint32_t last_token;
    char init[sizeof(struct fuse_in_header) + sizeof(struct fuse_init_in)];
    size_t init_bytes;
    uint64_t init_unique;
    uint64_t relayed, repeated, placed;
    uint64_t answered; /* by the engine of now, or the last one */
    char *answer; /* of the thread that gets the answers */
    char *names_answer; /* of the one that gets those about names */

    pthread_mutex_t notice_lock;
    pthread_cond_t notice_added;
    struct notice *notices, **notices_end;
    uint32_t notice_count;
    uint64_t noticed, refused;
};

/* -- to the engine -- */

/* Under the lock. Who waits for that request has got a signal. */
static void send_interrupt(struct tierfs_relay *relay, const struct tierfs_request *meant)
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

/* Under the lock, which is given up while the message is sent. Returns 0 or -errno. */
static int send_request(struct tierfs_relay *relay, struct tierfs_request *request, int flags)
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
        send_interrupt(relay, request);
    bool again = request->again;
    tierfs_pending_sent(&relay->pending, request, result == 0);
    if (--relay->senders == 0 || again)
        pthread_cond_broadcast(&relay->changed);
    return result;
}

/* Sends what did not fit into the socket at once, and everything that waited for an engine. */
static void *send_requests(void *context)
{
    struct tierfs_relay *relay = context;

    pthread_mutex_lock(&relay->lock);
    for (;;) {
        while (!relay->attached || relay->pending.unsent == NULL)
            pthread_cond_wait(&relay->changed, &relay->lock);
        struct tierfs_request *request = relay->pending.unsent;
        relay->pending.unsent = request->later;
        bool unanswered = request->unanswered;
        int result = send_request(relay, request, 0);
        if (result == 0 && unanswered)
            tierfs_pending_remove(&relay->pending, request);
        if (result < 0)
            relay->attached = false; /* it is dying: the thread that gets the answers sees the end soon */
    }
    return NULL;
}

static bool changes_names(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_SYMLINK:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
    case FUSE_LINK:
    case FUSE_CREATE:
    case FUSE_REMOVEXATTR:
        return true;
    default:
        return false;
    }
}

static bool has_no_answer(uint32_t opcode)
{
    return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET || opcode == FUSE_INTERRUPT;
}

/* pyfuse3 would answer ENOSYS, which the kernel remembers for as long as the mount lives. */
static bool is_extra(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_READDIR: /* pyfuse3 has READDIRPLUS alone; of a snapshot, all others are answered here */
    case FUSE_FALLOCATE:
    case FUSE_LSEEK:
    case FUSE_COPY_FILE_RANGE:
    case FUSE_COPY_FILE_RANGE_64:
    case FUSE_TMPFILE:
        return true;
    default:
        return false;
    }
}

/* What ends with the commit of one change in the namespace. */
static bool is_about_names(uint32_t opcode)
{
    return opcode == FUSE_CREATE || opcode == FUSE_UNLINK || opcode == FUSE_RENAME || opcode == FUSE_RENAME2;
}

/* What the relay itself reads of a request, behind the header. */
static size_t body_needed(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_OPEN:
    case FUSE_OPENDIR:
        return sizeof(struct fuse_open_in);
    case FUSE_CREATE:
    case FUSE_TMPFILE:
        return sizeof(struct fuse_create_in);
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
        return sizeof(struct fuse_release_in);
    case FUSE_INIT:
        return sizeof(struct fuse_init_in);
    case FUSE_INTERRUPT:
        return sizeof(struct fuse_interrupt_in);
    case FUSE_READ:
        return sizeof(struct fuse_read_in);
    default:
        return 0;
    }
}

static void answer_error(const struct tierfs_origin *origin, uint64_t unique, int error)
{
    struct fuse_out_header header = {.len = sizeof header, .error = -error, .unique = unique};
    int result = origin != NULL ? tierfs_origin_answer(origin, &header, sizeof header) : 0;

    if (result < 0 && result != -ENOENT && result != -ENODEV)
        tierfs_warning("an answer was not taken  reason=\"%s\"", strerror(-result));
}

/* Under the lock. The next engine has to know as well, should this one die. */
static void note_interrupt(struct tierfs_relay *relay, const struct fuse_in_header *header)
{
    const struct fuse_interrupt_in *interrupt = (const void *)(header + 1);
    struct tierfs_request *meant = tierfs_pending_find(&relay->pending, interrupt->unique);

    if (meant == NULL)
        return;
    meant->interrupted = true;
    if (relay->attached && meant->sent)
        send_interrupt(relay, meant);
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

static bool opens_to_write(uint32_t flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0;
}

static int begin_open(struct tierfs_relay *relay, const struct fuse_in_header *header)
{
    const struct fuse_open_in *open = (const void *)(header + 1);

    return tierfs_backing_open_begins(relay->links.backing, header->nodeid, opens_to_write(open->flags));
}

static void mark_open(struct tierfs_request *request, bool is_passed)
{
    struct fuse_open_in *open = (void *)(request->message + sizeof(struct fuse_in_header));

    open->flags &= ~TIERFS_OPEN_PASSED;
    if (is_passed)
        open->flags |= TIERFS_OPEN_PASSED;
}

static void note_released(struct tierfs_relay *relay, const struct fuse_in_header *header)
{
    const struct fuse_release_in *release = (const void *)(header + 1);

    if (tierfs_handles_remove(relay->links.handles, release->fh) && header->opcode == FUSE_RELEASE)
        tierfs_backing_released(relay->links.backing, header->nodeid);
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
    if (bytes - sizeof *header < body_needed(header->opcode) ||
        (is_extra(header->opcode) && bytes > TIERFS_CHANNEL_MAX_BYTES)) {
        if (!has_no_answer(header->opcode))
            answer_error(origin, header->unique, EINVAL);
        return;
    }
    if (header->opcode == FUSE_RELEASE || header->opcode == FUSE_RELEASEDIR)
        note_released(relay, header);
    int passed = header->opcode == FUSE_OPEN ? begin_open(relay, header) : 0;
    if (passed < 0) {
        answer_error(origin, header->unique, -passed);
        return;
    }
    pthread_mutex_lock(&relay->lock);
    relay->relayed++;
    if (has_no_answer(header->opcode)) {
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
        answer_error(origin, header->unique, 0); /* close(2) has returned long ago */
        return;
    }
    while (relay->pending.bytes > PENDING_MAX_BYTES && bytes > 4096)
        pthread_cond_wait(&relay->changed, &relay->lock);
    struct tierfs_request *request =
        tierfs_pending_add(&relay->pending, header->unique, message, bytes, origin);
    if (request == NULL) {
        pthread_mutex_unlock(&relay->lock);
        if (header->opcode == FUSE_OPEN)
            tierfs_backing_open_failed(relay->links.backing, header->nodeid,
                                       opens_to_write(((const struct fuse_open_in *)(header + 1))->flags));
        answer_error(origin, header->unique, ENOMEM);
        return;
    }
    struct fuse_in_header *copy = (void *)request->message;
    request->extra = is_extra(header->opcode);
    request->names = relay->has_names && is_about_names(header->opcode);
    if (changes_names(header->opcode)) {
        if (++relay->last_token > INT32_MAX)
            relay->last_token = 1;
        copy->pid = relay->last_token;
    }
    if (header->opcode == FUSE_OPEN)
        mark_open(request, passed > 0);
    if (header->opcode == FUSE_READ && relay->takes_places)
        offer_places(request);
    if (header->opcode == FUSE_INIT) {
        memcpy(relay->init, message, sizeof relay->init);
        relay->init_bytes = sizeof relay->init;
        relay->init_unique = header->unique;
    }
    if (relay->attached && relay->pending.unsent == request) {
        relay->pending.unsent = NULL;
        if (send_request(relay, request, MSG_DONTWAIT) < 0)
            pthread_cond_broadcast(&relay->changed);
    } else {
        pthread_cond_broadcast(&relay->changed);
    }
    pthread_mutex_unlock(&relay->lock);
}

/* -- from the engine -- */

/* One packet is one message, and it has to fit into the buffer of the socket. */
static void cap_messages(const struct tierfs_relay *relay, struct fuse_init_out *granted)
{
    int buffer = 0;
    socklen_t size = sizeof buffer;
    const uint32_t page = 4096;

    if (getsockopt(relay->socket, SOL_SOCKET, SO_SNDBUF, &buffer, &size) < 0 || buffer <= 0)
        return;
    uint32_t pages = (uint32_t)buffer / page;
    pages = pages > 3 ? pages - 2 : 1; /* headers, and what the kernel counts besides the bytes */
    if (granted->max_write > pages * page)
        granted->max_write = pages * page;
    if ((granted->flags & FUSE_MAX_PAGES) != 0 && granted->max_pages > pages)
        granted->max_pages = (uint16_t)pages;
}

/* The kernel's own calculation (fs/fuse/dev_uring.c): a payload holds the largest request and the largest answer. */
static size_t payload_of(const struct fuse_init_out *granted)
{
    size_t pages =
        (granted->flags & FUSE_MAX_PAGES) != 0 && granted->max_pages != 0 ? granted->max_pages : 32;
    size_t bytes = granted->max_write > pages * 4096 ? granted->max_write : pages * 4096;

    return bytes > FUSE_MIN_READ_BUFFER ? bytes : FUSE_MIN_READ_BUFFER;
}

/*
 * Reads of the page cache are background requests for the kernel, which sends 12 at a time if it is not told
 * otherwise: as many that wait for the store would keep all others from being sent, those of local files too.
 */
#define BACKGROUND_REQUESTS 1024u

static void amend_init(struct tierfs_relay *relay, struct fuse_out_header *header, size_t bytes)
{
    const struct fuse_init_in *asked = (const void *)(relay->init + sizeof(struct fuse_in_header));
    struct fuse_init_out *granted = (void *)(header + 1);
    uint64_t offered = asked->flags;
    uint64_t added = 0;

    if (header->error != 0 || bytes < sizeof *header + sizeof *granted)
        return;
    if ((asked->flags & FUSE_INIT_EXT) != 0)
        offered |= (uint64_t)asked->flags2 << 32;
    added = offered & (FUSE_PARALLEL_DIROPS | FUSE_DO_READDIRPLUS | FUSE_INIT_EXT);
    /*
     * With the first version, which pyfuse3 asks for, the kernel asks for security.capability before every write;
     * with the second one once, until it gets attributes.
     */
    added |= offered & FUSE_HANDLE_KILLPRIV_V2;
    if (relay->lists_plainly)
        added |= offered & FUSE_READDIRPLUS_AUTO;
    if ((offered & FUSE_PASSTHROUGH) != 0) {
        added |= FUSE_PASSTHROUGH;
        granted->max_stack_depth = 1;
    }
    cap_messages(relay, granted);
    if (relay->links.prepare_ring != NULL &&
        relay->links.prepare_ring(relay->links.context, (offered & FUSE_OVER_IO_URING) != 0,
                                  payload_of(granted)))
        added |= FUSE_OVER_IO_URING;
    granted->max_background = BACKGROUND_REQUESTS;
    granted->congestion_threshold = BACKGROUND_REQUESTS / 4 * 3;
    if (relay->truncates_apart)
        granted->flags &= ~(uint32_t)FUSE_ATOMIC_O_TRUNC;
    granted->flags |= (uint32_t)(added & UINT32_MAX);
    granted->flags2 |= (uint32_t)(added >> 32);
    tierfs_info("the kernel is answered  minor=%u max_write=%u max_pages=%u passthrough=%d", granted->minor,
                granted->max_write, granted->max_pages, (offered & FUSE_PASSTHROUGH) != 0);
}

/* Nobody took the answer: the request was given up. What was opened has to be closed again. */
static void undo_open(struct tierfs_relay *relay, const struct tierfs_handle *handle, uint64_t unique)
{
    struct {
        struct fuse_in_header header;
        struct fuse_release_in release;
    } message = {0};

    message.header.len = sizeof message;
    message.header.opcode = (handle->kind & TIERFS_HANDLE_DIRECTORY) != 0 ? FUSE_RELEASEDIR : FUSE_RELEASE;
    /* The kernel's are even, and those of its interrupts are odd without the highest bit. */
    message.header.unique = unique | UINT64_C(1) << 63;
    message.header.nodeid = handle->ino;
    message.release.fh = handle->fh;
    message.release.flags = handle->open_flags;
    tierfs_relay_request(relay, &message, sizeof message, NULL);
}

/* An answer to OPEN, OPENDIR or CREATE: remember the handle, and let it pass through if that can be. */
static bool note_opened(struct tierfs_relay *relay, const struct tierfs_request *request,
                        struct fuse_out_header *header, size_t bytes, struct tierfs_handle *handle)
{
    const struct fuse_in_header *asked = (const void *)request->message;
    const struct fuse_open_in *in = (const void *)(asked + 1);
    bool is_new = asked->opcode == FUSE_CREATE || asked->opcode == FUSE_TMPFILE;
    size_t before = is_new ? sizeof(struct fuse_entry_out) : 0;
    struct fuse_open_out *out = (void *)((char *)(header + 1) + before);
    bool is_open = asked->opcode == FUSE_OPEN;
    bool writes = opens_to_write(in->flags);
    bool wanted = asked->opcode != FUSE_OPENDIR;
    int32_t id = 0;

    if (header->error != 0 || bytes < sizeof *header + before + sizeof *out) {
        if (is_open)
            tierfs_backing_open_failed(relay->links.backing, asked->nodeid, writes);
        return false;
    }
    *handle = (struct tierfs_handle){
        .fh = out->fh, .ino = asked->nodeid, .open_flags = in->flags, .uid = asked->uid};
    handle->open_flags &= ~TIERFS_OPEN_PASSED;
    bool tells_close = wanted && (out->open_flags & TIERFS_OPEN_TELL_CLOSE) != 0;
    wanted = wanted && (out->open_flags & TIERFS_OPEN_MAY_PASS) != 0;
    /* Who brings the answer to TMPFILE, which comes on the channel, is reading the channel. */
    if (wanted && asked->opcode != FUSE_TMPFILE)
        relay->links.read_channel(relay->links.context);
    if (is_new) {
        handle->ino = ((struct fuse_entry_out *)(header + 1))->nodeid;
        id = tierfs_backing_created(relay->links.backing, handle->ino, wanted);
    } else if (is_open) {
        id = tierfs_backing_open_ends(relay->links.backing, asked->nodeid, writes, wanted);
    } else {
        handle->kind = TIERFS_HANDLE_DIRECTORY;
    }
    if (id != 0) {
        handle->kind = TIERFS_HANDLE_PASSTHROUGH;
        out->open_flags = (out->open_flags & FOPEN_NOFLUSH) | FOPEN_PASSTHROUGH;
        out->backing_id = id;
        if (tells_close)
            tierfs_backing_tell_close(relay->links.backing, handle->ino);
        else if (relay->closes_untold) /* what was stored into a mapping is in the file already */
            out->open_flags |= FOPEN_NOFLUSH;
    }
    if (asked->opcode != FUSE_OPENDIR)
        out->open_flags &= ~(TIERFS_OPEN_MAY_PASS | TIERFS_OPEN_TELL_CLOSE);
    if (tierfs_handles_add(relay->links.handles, handle) < 0)
        tierfs_warning("no memory to remember an open file; it will not outlive the engine");
    return true;
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
        opened = note_opened(relay, request, header, bytes, &handle);
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
        undo_open(relay, &handle, header->unique);
    if (error != ENOENT && error != ENODEV) {
        tierfs_warning("an answer was not taken  opcode=%u bytes=%zu reason=\"%s\"", opcode, bytes,
                       strerror(error));
        answer_error(origin, header->unique, EIO);
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

static void queue_notice(struct tierfs_relay *relay, size_t bytes)
{
    struct notice *notice = malloc(sizeof *notice + bytes);

    if (notice == NULL)
        return;
    notice->next = NULL;
    notice->bytes = bytes;
    memcpy(notice->message, relay->answer, bytes);
    pthread_mutex_lock(&relay->notice_lock);
    if (relay->notice_count < NOTICES_MAX) {
        *relay->notices_end = notice;
        relay->notices_end = &notice->next;
        relay->notice_count++;
        notice = NULL;
        pthread_cond_signal(&relay->notice_added);
    } else {
        relay->refused++;
    }
    pthread_mutex_unlock(&relay->notice_lock);
    free(notice);
}

/* The kernel does not know an inode: then nobody has it open. Tells the engine, which waits for its FORGET. */
static void tell_unknown(struct tierfs_relay *relay, uint64_t ino)
{
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

/* The inode of a message that says that its attributes or bytes have changed; 0 of any other. */
static uint64_t inode_of_notice(const struct notice *notice)
{
    struct {
        struct fuse_out_header header;
        uint64_t ino;
    } start;

    if (notice->bytes < sizeof start)
        return 0;
    memcpy(&start, notice->message, sizeof start);
    return start.header.error == FUSE_NOTIFY_INVAL_INODE ? start.ino : 0;
}

/* Notifications may wait for an inode lock that a request in progress holds: never from a thread that answers. */
static void *send_notices(void *context)
{
    struct tierfs_relay *relay = context;

    pthread_mutex_lock(&relay->notice_lock);
    for (;;) {
        while (relay->notices == NULL)
            pthread_cond_wait(&relay->notice_added, &relay->notice_lock);
        struct notice *notice = relay->notices;
        int device = relay->device;
        relay->notices = notice->next;
        if (relay->notices == NULL)
            relay->notices_end = &relay->notices;
        relay->notice_count--;
        pthread_mutex_unlock(&relay->notice_lock);
        ssize_t written = write(device, notice->message, notice->bytes);
        uint64_t unknown = written < 0 && errno == ENOENT ? inode_of_notice(notice) : 0;
        free(notice);
        if (unknown != 0)
            tell_unknown(relay, unknown);
        pthread_mutex_lock(&relay->notice_lock);
        if (written < 0)
            relay->refused++;
        else
            relay->noticed++;
    }
    return NULL;
}

/* Nothing comes from this engine any more. */
static void end_of_engine(struct tierfs_relay *relay)
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

/* Gets answers from one engine after another. */
static void *get_answers(void *context)
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
            bytes = recv(socket, relay->answer, MESSAGE_MAX_BYTES, 0);
        while (bytes < 0 && errno == EINTR);
        if (bytes >= (ssize_t)sizeof(struct fuse_out_header)) {
            if (((const struct fuse_out_header *)(const void *)relay->answer)->unique == 0)
                queue_notice(relay, (size_t)bytes);
            else
                forward_answer(relay, (size_t)bytes);
            continue;
        }
        end_of_engine(relay);
    }
    return NULL;
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
        if (request != NULL && !request->names)
            request = NULL; /* another thread takes it out, at any time from here on */
        pthread_mutex_unlock(&relay->lock);
        if (request != NULL)
            finish(relay, request, header, length);
        position += (length + 7) & ~(size_t)7;
        if (position > bytes)
            return;
    }
}

/* Gets answers about names from one engine after another. */
static void *get_names_answers(void *context)
{
    struct tierfs_relay *relay = context;

    for (;;) {
        pthread_mutex_lock(&relay->lock);
        while (relay->names < 0 || relay->names_ended)
            pthread_cond_wait(&relay->changed, &relay->lock);
        int socket = relay->names;
        pthread_mutex_unlock(&relay->lock);
        ssize_t bytes;
        while ((bytes = recv(socket, relay->names_answer, NAMES_MAX_BYTES, 0)) > 0 ||
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

/* -- for the main thread -- */

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
    made->device = made->socket = made->channel = made->names = -1;
    made->notices_end = &made->notices;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    pthread_mutex_init(&made->notice_lock, NULL);
    pthread_cond_init(&made->notice_added, NULL);
    made->answer = aligned_alloc(4096, MESSAGE_MAX_BYTES);
    made->names_answer = malloc(NAMES_MAX_BYTES);
    if (made->answer == NULL || made->names_answer == NULL)
        return -ENOMEM;
    *relay = made;
    result = start_thread(send_requests, made);
    if (result == 0)
        result = start_thread(get_answers, made);
    if (result == 0)
        result = start_thread(get_names_answers, made);
    if (result == 0)
        result = start_thread(send_notices, made);
    return result;
}

void tierfs_relay_set_device(struct tierfs_relay *relay, int device)
{
    pthread_mutex_lock(&relay->notice_lock);
    relay->device = device;
    pthread_mutex_unlock(&relay->notice_lock);
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

void tierfs_relay_counts(struct tierfs_relay *relay, struct tierfs_counts *counts)
{
    pthread_mutex_lock(&relay->lock);
    counts->relayed = relay->relayed;
    counts->repeated = relay->repeated;
    counts->pending = (uint32_t)relay->pending.count;
    counts->placed = relay->placed;
    pthread_mutex_unlock(&relay->lock);
    pthread_mutex_lock(&relay->notice_lock);
    counts->notifications = relay->noticed;
    counts->notifications_refused = relay->refused;
    pthread_mutex_unlock(&relay->notice_lock);
}

uint64_t tierfs_relay_answered(struct tierfs_relay *relay)
{
    pthread_mutex_lock(&relay->lock);
    uint64_t answered = relay->answered;
    pthread_mutex_unlock(&relay->lock);
    return answered;
}
