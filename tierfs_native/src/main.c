/*
 * tierfs-front: the process that holds the mount. It answers what the local state can answer, hands the rest to the
 * engine, and starts another engine when one dies. It never waits for the network, and nothing here is Python.
 *
 *   tierfs-front --state-dir DIR [--workers N] [--report FD] -- ENGINE [ARGUMENT...]
 *
 * Threads: this one (signals, the channel, the engine's life), the workers of device.c, the one of disk.c, the three of
 * relay.h, the one of notifications.c, and those of uring.c, if any.
 */
#define _GNU_SOURCE
#include "abi.h"
#include "answer.h"
#include "backing.h"
#include "channel.h"
#include "device.h"
#include "engine.h"
#include "handles.h"
#include "log.h"
#include "messages.h"
#include "noopen.h"
#include "placed.h"
#include "reading.h"
#include "relay.h"
#include "small.h"
#include "uring.h"
#include "view.h"

#include <errno.h>
#include <getopt.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_WORKERS 16u
#define USEFUL_MS 1000 /* an engine that has served for so long was worth starting */
#define LONGEST_PAUSE_MS 30000
#define MOST_PAUSE_DOUBLINGS 5
#define EXIT_FAILED 1
#define TIERFS_EXIT_UPGRADE 75 /* an engine that made room for a newer one */
#define TOUCHED_MS 500

struct queued_packet {
    struct queued_packet *next;
    struct tierfs_packet packet;
};

struct front {
    const char *state_dir;
    char *const *command;
    int report;
    unsigned workers;
    int signals, gone, woken; /* signalfd and two eventfds */
    struct tierfs_engine engine;
    int64_t
        ready_at_ms; /* when the engine of now said that it serves; 0: not yet. Monotonic, as start_at_ms */
    int64_t start_at_ms; /* 0: an engine is running */
    unsigned useless;    /* engines that died without an answer since one has served for USEFUL_MS */
    uint32_t engine_starts;
    bool ready;          /* an engine has served: from then on a dead one is replaced */
    bool stopping;       /* an engine ends on purpose, or the kernel has let go of the mount */
    unsigned stop_asked; /* signals that asked for it */
    bool mounted;
    struct tierfs_device *device;
    struct tierfs_backing *backing;
    struct tierfs_handles *handles;
    struct tierfs_relay *relay;
    _Atomic(struct tierfs_answers *) answers; /* NULL until the engine has told with which settings */
    struct tierfs_view *view;
    struct tierfs_reader *readers[MAX_WORKERS + TIERFS_URING_MAX_THREADS]; /* each of one worker */
    bool wants_ring;
    _Atomic(struct tierfs_uring *) uring; /* NULL: all requests come through /dev/fuse */
    atomic_int ring_errno; /* why there is none */
    struct tierfs_reading *reading;
    uint8_t place_mark[TIERFS_PLACE_MARK_BYTES];
    struct tierfs_small *small; /* NULL: the engine opens and reads all files */
    struct tierfs_noopen *noopen; /* NULL: things are written through this mount, or the engine answers all */
    atomic_uint_fast64_t answered;
    atomic_bool holds_writers; /* TIERFS_HOLD */
    /* The channel is read by this thread, and by the one that gets the engine's answers. */
    pthread_mutex_t channel_lock;
    struct queued_packet *packets, **packets_end;
};

static int64_t now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void wake(int eventfd)
{
    uint64_t one = 1;

    if (write(eventfd, &one, sizeof one) < 0)
        tierfs_warning("an event was lost  reason=\"%s\"", strerror(errno));
}

static void tell_engine(struct front *front, uint16_t kind, uint64_t value, const void *body, size_t bytes)
{
    int channel = front->engine.channel;
    int result = channel >= 0 ? tierfs_channel_send(channel, kind, value, body, bytes, 0) : 0;

    if (result < 0 && result != -EPIPE && result != -ECONNRESET)
        tierfs_warning("the engine was not told  kind=%u reason=\"%s\"", kind, strerror(-result));
}

/* -- requests, in the threads of device.c -- */

static void answer(const struct tierfs_origin *origin, void *buffer, uint64_t unique, long result)
{
    struct fuse_out_header *header = buffer;

    *header = (struct fuse_out_header){
        .len = (uint32_t)(sizeof *header + (result > 0 ? (size_t)result : 0)),
        .error = result < 0 ? (int32_t)result : 0,
        .unique = unique,
    };
    /* ENOENT: the request was interrupted and nobody waits. */
    int taken = tierfs_origin_answer(origin, header, header->len);
    if (taken < 0 && taken != -ENOENT && taken != -ENODEV)
        tierfs_warning("an answer was not taken  reason=\"%s\"", strerror(-taken));
}

static long answer_from_view(struct front *front, struct tierfs_answers *answers, unsigned worker,
                             const struct fuse_in_header *header, size_t body_bytes,
                             const struct tierfs_origin *origin, void *out, size_t capacity)
{
    long result = TIERFS_NOT_SMALL;

    if (front->small != NULL)
        result = tierfs_small_answer(front->small, worker, front->readers[worker], header, header + 1,
                                     body_bytes, origin, out, capacity);

    if (result == TIERFS_NOT_SMALL)
        result =
            tierfs_answer(answers, front->readers[worker], header, header + 1, body_bytes, out, capacity);
    return result;
}

/*
 * Before it writes to a file that is passed through, the kernel asks for security.capability, unless it knows that
 * there is none (which it forgets with every answer about attributes). The engine lets the answer wait while its
 * disk is too full: the only sign of such a write there is.
 */
static bool is_for_engine(struct front *front, const struct fuse_in_header *header)
{
    if (header->opcode == FUSE_FLUSH)
        return tierfs_backing_tells_close(front->backing, header->nodeid);
    return header->opcode == FUSE_GETXATTR &&
           atomic_load_explicit(&front->holds_writers, memory_order_relaxed) &&
           tierfs_backing_is_passed(front->backing, header->nodeid);
}

/*
 * out: where the body of an answer goes. Returns its bytes (>= 0), -errno, or TIERFS_NO_REPLY: there is no answer, or
 * origin gets it later.
 */
static long answer_request(struct front *front, unsigned worker, void *message, size_t bytes,
                           const struct tierfs_origin *origin, void *out, size_t capacity)
{
    const struct fuse_in_header *header = message;
    struct tierfs_answers *answers = atomic_load_explicit(&front->answers, memory_order_acquire);
    long result = TIERFS_RELAY;

    if (answers != NULL && !is_for_engine(front, header)) {
        if (front->readers[worker] == NULL && tierfs_reader_open(front->view, &front->readers[worker]) < 0)
            front->readers[worker] = NULL;
        if (front->noopen != NULL)
            result = tierfs_noopen_answer(front->noopen, front->readers[worker], header,
                                          (struct fuse_in_header *)message + 1, bytes - sizeof *header);
        if (result == TIERFS_NOT_NOOPEN)
            result = TIERFS_RELAY;
        if (result == TIERFS_RELAY && front->readers[worker] != NULL)
            result = answer_from_view(front, answers, worker, header, bytes - sizeof *header, origin, out,
                                      capacity);
    }
    if (result == TIERFS_RELAY) {
        tierfs_relay_request(front->relay, message, bytes, origin);
        return TIERFS_NO_REPLY;
    }
    atomic_fetch_add_explicit(&front->answered, 1, memory_order_relaxed);
    return result;
}

/* A request that device.c has read. */
static void handle_request(void *context, unsigned worker, void *message, size_t bytes,
                           const struct tierfs_origin *origin, void *buffer)
{
    const struct fuse_in_header *header = message;

    if (bytes < sizeof *header || header->len != bytes)
        return; /* never sent by a kernel; there is no number to answer to */
    long result =
        answer_request(context, worker, message, bytes, origin, (struct fuse_out_header *)buffer + 1,
                       TIERFS_REQUEST_MAX_BYTES - sizeof(struct fuse_out_header));
    if (result != TIERFS_NO_REPLY)
        answer(origin, buffer, header->unique, result);
}

/* A request that uring.c has got; its threads are workers behind those of device.c. */
static long answer_from_ring(void *context, unsigned thread, void *message, size_t bytes,
                             const struct tierfs_origin *origin, void *out, size_t capacity)
{
    struct front *front = context;

    return answer_request(front, front->workers + thread, message, bytes, origin, out, capacity);
}

static bool prepare_ring(void *context, bool is_offered, size_t payload_bytes)
{
    struct front *front = context;
    const struct tierfs_uring_links links = {.answer = answer_from_ring, .context = front};
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

static void begin_ring(void *context)
{
    struct front *front = context;
    struct tierfs_uring *uring = atomic_load_explicit(&front->uring, memory_order_acquire);

    if (uring == NULL)
        return;
    tierfs_uring_begin(uring);
    tierfs_info("requests come through io_uring  depth=%u", tierfs_uring_depth_of(uring));
}

/* -- the channel -- */

/* Any thread. What the main thread has to do is queued for it, in order. Returns false when the engine is gone. */
static bool take_packets(struct front *front)
{
    bool open = true;

    pthread_mutex_lock(&front->channel_lock);
    while (front->engine.channel >= 0) {
        struct queued_packet *queued = malloc(sizeof *queued);
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

static void take_packets_for_relay(void *context)
{
    (void)take_packets(context);
}

static struct queued_packet *next_packet(struct front *front)
{
    pthread_mutex_lock(&front->channel_lock);
    struct queued_packet *queued = front->packets;
    if (queued != NULL) {
        front->packets = queued->next;
        if (front->packets == NULL)
            front->packets_end = &front->packets;
    }
    pthread_mutex_unlock(&front->channel_lock);
    return queued;
}

static int mount_it(struct front *front, const struct tierfs_packet *packet)
{
    const struct tierfs_device_links links = {
        .handle = handle_request, .context = front, .gone = front->gone};
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

/* What was read without the engine counts as used: else it would be evicted first. Any thread. */
static void tell_touched(void *context)
{
    struct front *front = context;
    uint64_t inos[TIERFS_SMALL_TOUCHED];

    pthread_mutex_lock(&front->channel_lock);
    size_t count = tierfs_small_touched(front->small, inos);
    if (count != 0 && front->engine.channel >= 0)
        (void)tierfs_channel_send(front->engine.channel, TIERFS_TOUCHED, 0, inos, count * sizeof inos[0],
                                  MSG_DONTWAIT);
    pthread_mutex_unlock(&front->channel_lock);
}

/* A read from the device that could not be answered. */
static void relay_read(void *context, const void *message, size_t bytes, const struct tierfs_origin *origin)
{
    struct front *front = context;

    tierfs_small_missed(front->small);
    tierfs_relay_request(front->relay, message, bytes, origin);
}

static void make_disk(struct front *front)
{
    const struct tierfs_disk_links links = {.relay = relay_read, .context = front};
    struct tierfs_disk *disk = NULL;
    int result = tierfs_disk_create(&links, front->reading, false, &disk);

    if (result < 0)
        tierfs_warning("who reads requests also waits for the device  reason=\"%s\"", strerror(-result));
    else
        tierfs_small_set_disk(front->small, disk);
}

/* The tiers from which small files can be read: strings behind the settings, each a letter and a path. */
static void make_small(struct front *front, const struct tierfs_packet *packet, size_t position)
{
    const char *root;
    bool is_memory;
    int more = 1;
    int result = tierfs_reading_create(&front->reading);

    while (result == 0 && more > 0) {
        more = tierfs_message_tier(packet->body, packet->header.body_bytes, &position, &root, &is_memory);
        result = more > 0 ? tierfs_reading_add_tier(front->reading, root, is_memory) : more;
    }
    if (result == 0)
        result =
            tierfs_small_create(front->backing, front->reading, front->workers + TIERFS_URING_MAX_THREADS,
                                front->workers - 1, &front->small);
    if (result < 0)
        tierfs_warning("the engine reads small files  reason=\"%s\"", strerror(-result));
    else
        tierfs_small_on_miss(front->small, tell_touched, front);
    if (result < 0)
        return;
    make_disk(front);
    tierfs_relay_takes_places(front->relay);
}

/* For the relay, once the tiers are known. */
static long read_placed(void *context, const void *body, size_t body_bytes, char *out, size_t out_capacity)
{
    const struct front *front = context;

    return tierfs_placed_read(front->reading, front->place_mark, body, body_bytes, out, out_capacity);
}

static void tell_of_noopen(void *context)
{
    (void)context;
    tierfs_info("from now on the kernel opens files without asking");
}

static void make_noopen(struct front *front, const struct tierfs_view_settings *said)
{
    int result;

    if (said->read_only == 0)
        return;
    result = tierfs_noopen_create((enum tierfs_open_mode)said->open_mode, front->backing, &front->noopen);
    if (result < 0)
        tierfs_warning("every open is answered  reason=\"%s\"", strerror(-result));
    else
        tierfs_noopen_on_begin(front->noopen, tell_of_noopen, front);
    tierfs_relay_truncates_apart(front->relay);
}

/* From here on names are looked up without the engine, if it says so. */
static void make_view(struct front *front, const struct tierfs_packet *packet)
{
    struct tierfs_view_settings said;
    size_t tiers;
    char path[4096];
    int used = snprintf(path, sizeof path, "%s/namespace.lmdb", front->state_dir);

    if (tierfs_message_view(packet->body, packet->header.body_bytes, &said, &tiers) < 0 || used < 0 ||
        (size_t)used >= sizeof path)
        return;
    if (said.answers == 0 || front->view != NULL)
        return;
    const struct tierfs_answer_settings settings = {
        .ttl_ns = said.ttl_ns,
        .negative_ttl_ns = said.negative_ttl_ns,
        .uid = said.uid,
        .gid = said.gid,
        .file_mode = said.file_mode,
        .dir_mode = said.dir_mode,
        .read_only = said.read_only != 0,
        .close_waits = said.close_waits != 0,
    };
    struct tierfs_answers *answers = NULL;
    int result = tierfs_view_open(path, &front->view);
    if (result == 0)
        result = tierfs_answers_open(&settings, &answers);
    if (result < 0) {
        tierfs_warning("the front cannot read the namespace; the engine answers all  reason=\"%s\"",
                       strerror(-result));
        return;
    }
    tierfs_relay_lists_plainly(front->relay);
    if (!said.close_waits)
        tierfs_relay_closes_untold(front->relay);
    make_small(front, packet, tiers);
    make_noopen(front, &said);
    front->wants_ring = said.transport == TIERFS_TRANSPORT_RING;
    atomic_store_explicit(&front->answers, answers, memory_order_release);
}

static void tell_counts(struct front *front)
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
    tell_engine(front, TIERFS_COUNTS, 0, &counts, sizeof counts);
}

static void handle_packet(struct front *front, const struct tierfs_packet *packet)
{
    int result;

    switch (packet->header.kind) {
    case TIERFS_MOUNT:
        result = mount_it(front, packet);
        tell_engine(front, TIERFS_MOUNTED, (uint64_t)-result, NULL, 0);
        break;
    case TIERFS_ATTACH:
        tierfs_relay_attach(front->relay);
        break;
    case TIERFS_UNMOUNT:
        result = front->device != NULL ? tierfs_device_unmount(front->device, (int)packet->header.value) : 0;
        front->mounted = front->mounted && result < 0;
        tell_engine(front, TIERFS_UNMOUNTED, (uint64_t)-result, NULL, 0);
        break;
    case TIERFS_VIEW:
        make_view(front, packet);
        break;
    case TIERFS_READY:
        front->ready = true;
        front->ready_at_ms = now_ms();
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

static void handle_packets(struct front *front)
{
    for (struct queued_packet *queued; (queued = next_packet(front)) != NULL; free(queued))
        handle_packet(front, &queued->packet);
}

/* -- the engine's life -- */

/* Those have no handle that an engine could restore; but the inodes have to live on without a name. */
static int tell_opened_here(struct front *front)
{
    struct tierfs_handle handles[TIERFS_HANDLES_PER_MESSAGE];
    uint64_t *inos;
    size_t count;
    int result = tierfs_backing_list_here(front->backing, &inos, &count);

    for (size_t i = 0; result == 0 && i < count;) {
        size_t some = 0;
        for (; some < TIERFS_HANDLES_PER_MESSAGE && i < count; some++, i++)
            handles[some] = (struct tierfs_handle){
                .fh = TIERFS_FH_FRONT | inos[i], .ino = inos[i], .kind = TIERFS_HANDLE_FRONT};
        tell_engine(front, TIERFS_HANDLES, 0, handles, some * sizeof handles[0]);
    }
    free(inos);
    return result;
}

/* The same content may lie in several tiers: which file the kernel reads, only this process knows. */
static int tell_passed(struct front *front)
{
    struct tierfs_passed_file *files;
    size_t count;
    int result = tierfs_backing_list_passed(front->backing, &files, &count);

    for (size_t i = 0; result == 0 && i < count; i += TIERFS_HANDLES_PER_MESSAGE) {
        size_t some = count - i < TIERFS_HANDLES_PER_MESSAGE ? count - i : TIERFS_HANDLES_PER_MESSAGE;
        tell_engine(front, TIERFS_PASSED, 0, files + i, some * sizeof *files);
    }
    free(files);
    return result;
}

static int tell_handles(struct front *front)
{
    struct tierfs_hello hello = {.front_pid = (uint32_t)getpid(), .engine_starts = front->engine_starts};
    struct tierfs_handle *handles;
    size_t count;

    memcpy(hello.place_mark, front->place_mark, sizeof hello.place_mark);
    int result = tierfs_handles_copy(front->handles, &handles, &count);

    if (result < 0)
        return result;
    uint64_t said = front->mounted ? TIERFS_HELLO_REATTACHED : 0;
    if (front->noopen != NULL && tierfs_noopen_has_begun(front->noopen))
        said |= TIERFS_HELLO_UNTOLD;
    tell_engine(front, TIERFS_HELLO, said, &hello, sizeof hello);
    for (size_t i = 0; i < count; i += TIERFS_HANDLES_PER_MESSAGE) {
        size_t some = count - i < TIERFS_HANDLES_PER_MESSAGE ? count - i : TIERFS_HANDLES_PER_MESSAGE;
        tell_engine(front, TIERFS_HANDLES, 0, handles + i, some * sizeof *handles);
    }
    free(handles);
    result = tell_passed(front);
    if (result == 0)
        result = tell_opened_here(front);
    tell_engine(front, TIERFS_HELLO_END, 0, NULL, 0);
    return result;
}

static int start_engine(struct front *front)
{
    struct tierfs_engine engine;
    int result = tierfs_engine_start(front->command, front->report, &engine);

    if (front->report >= 0)
        close(front->report);
    front->report = -1;
    if (result < 0)
        return result;
    front->engine_starts++;
    front->ready_at_ms = 0;
    front->start_at_ms = 0;
    tierfs_relay_connect(front->relay, engine.requests, engine.channel, engine.names);
    pthread_mutex_lock(&front->channel_lock);
    front->engine = engine;
    pthread_mutex_unlock(&front->channel_lock);
    result = tell_handles(front);
    if (result < 0)
        kill(engine.pid, SIGKILL); /* it would not know what is open; the next one, perhaps */
    return 0;
}

/* The mount ends although the store does not have all of it. */
static int give_up(struct front *front)
{
    if (front->mounted)
        (void)tierfs_device_unmount(front->device, MNT_DETACH);
    tierfs_error("the mount ends without an engine; what is not in the store is kept for the next mount");
    return EXIT_FAILED;
}

static unsigned pause_before_next_ms(unsigned useless)
{
    /* The first two deaths are nobody's habit yet. */
    if (useless <= 2)
        return 0;
    return useless - 3 >= MOST_PAUSE_DOUBLINGS ? LONGEST_PAUSE_MS : 1000u << (useless - 3);
}

/* Returns the exit status if the front has to end with it, else -1. */
static int engine_ended(struct front *front, int status)
{
    (void)take_packets(front);
    handle_packets(front);
    tierfs_backing_drop_unasked(front->backing);
    atomic_store(&front->holds_writers, false);
    bool served = front->ready_at_ms != 0 && now_ms() - front->ready_at_ms >= USEFUL_MS;
    pthread_mutex_lock(&front->channel_lock);
    close(front->engine.channel);
    front->engine = (struct tierfs_engine){.pid = -1, .requests = -1, .channel = -1};
    pthread_mutex_unlock(&front->channel_lock);
    if (front->stopping || front->stop_asked > 0 || !front->ready) {
        if (!WIFEXITED(status))
            return give_up(front);
        if (front->mounted)
            (void)tierfs_device_unmount(front->device, MNT_DETACH);
        return WEXITSTATUS(status);
    }
    if (served)
        front->useless = 0;
    else if (front->ready_at_ms == 0 || tierfs_relay_answered(front->relay) == 0)
        front->useless++;
    unsigned pause_ms = pause_before_next_ms(front->useless);
    front->start_at_ms = now_ms() + pause_ms;
    if (WIFSIGNALED(status))
        tierfs_error("the engine died and is started again  signal=%d pause_ms=%u", WTERMSIG(status),
                     pause_ms);
    else if (WEXITSTATUS(status) == TIERFS_EXIT_UPGRADE)
        tierfs_info("the engine has made room for another");
    else
        tierfs_error("the engine ended and is started again  code=%d pause_ms=%u", WEXITSTATUS(status),
                     pause_ms);
    return -1;
}

static int reap(struct front *front)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        if (pid == front->engine.pid) {
            int code = engine_ended(front, status);
            if (code >= 0)
                return code;
        }
    return -1;
}

static int handle_signal(struct front *front)
{
    struct signalfd_siginfo info;

    if (read(front->signals, &info, sizeof info) != (ssize_t)sizeof info)
        return -1;
    if (info.ssi_signo == SIGCHLD)
        return reap(front);
    /*
     * A new engine of a mount that is there cannot stop in good order before it serves: it is told then (see
     * TIERFS_READY). Whoever asks twice does not want to wait for that.
     */
    int code = reap(front); /* it may be dead already */
    if (code >= 0)
        return code;
    front->stop_asked++;
    if (front->engine.pid <= 0)
        front->start_at_ms = now_ms();
    else if (!front->ready || front->ready_at_ms != 0 || front->stop_asked > 1)
        kill(front->engine.pid, (int)info.ssi_signo);
    return -1;
}

static void drain_event(int eventfd)
{
    uint64_t count;

    if (read(eventfd, &count, sizeof count) < 0 && errno != EAGAIN)
        tierfs_warning("an event cannot be read  reason=\"%s\"", strerror(errno));
}

static int run(struct front *front)
{
    int64_t told_ms = 0;

    for (;;) {
        struct pollfd polled[] = {{front->signals, POLLIN, 0},
                                  {front->gone, POLLIN, 0},
                                  {front->woken, POLLIN, 0},
                                  {front->engine.channel, POLLIN, 0}};
        int timeout_ms = front->small != NULL ? TOUCHED_MS : -1;

        if (front->small != NULL && now_ms() - told_ms >= TOUCHED_MS) {
            told_ms = now_ms();
            tell_touched(front);
        }
        if (front->start_at_ms != 0) {
            int64_t pause_ms = front->start_at_ms - now_ms();
            if (pause_ms <= 0) {
                int result = start_engine(front);
                if (result < 0) {
                    tierfs_error("no engine can be started  reason=\"%s\"", strerror(-result));
                    front->start_at_ms = now_ms() + LONGEST_PAUSE_MS;
                }
                continue;
            }
            timeout_ms = (int)pause_ms;
        }
        if (poll(polled, 4, timeout_ms) < 0 && errno != EINTR)
            return EXIT_FAILED;
        if (polled[2].revents != 0)
            drain_event(front->woken);
        if (polled[3].revents != 0 && !take_packets(front) && front->engine.pid <= 0)
            continue;
        handle_packets(front);
        if (polled[1].revents != 0) {
            drain_event(front->gone);
            front->mounted = false;
            front->stopping = true;
            if (front->engine.pid <= 0)
                return give_up(front);
            tell_engine(front, TIERFS_GONE, 0, NULL, 0);
        }
        if (polled[0].revents != 0) {
            int code = handle_signal(front);
            if (code >= 0)
                return code;
        }
    }
}

static int prepare(struct front *front)
{
    struct tierfs_relay_links links = {.read_channel = take_packets_for_relay,
                                       .prepare_ring = prepare_ring,
                                       .read_placed = read_placed,
                                       .begin_ring = begin_ring,
                                       .context = front};
    sigset_t wanted;
    int result;

    sigemptyset(&wanted);
    sigaddset(&wanted, SIGTERM);
    sigaddset(&wanted, SIGINT);
    sigaddset(&wanted, SIGCHLD);
    if (sigprocmask(SIG_BLOCK, &wanted, NULL) < 0)
        return -errno;
    signal(SIGPIPE, SIG_IGN);
    front->signals = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    front->gone = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    front->woken = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (front->signals < 0 || front->gone < 0 || front->woken < 0)
        return -errno;
    if (getrandom(front->place_mark, sizeof front->place_mark, 0) != sizeof front->place_mark)
        return -EIO;
    pthread_mutex_init(&front->channel_lock, NULL);
    front->packets_end = &front->packets;
    front->engine = (struct tierfs_engine){.pid = -1, .requests = -1, .channel = -1};
    result = tierfs_backing_create(&front->backing);
    if (result == 0)
        result = tierfs_handles_create(&front->handles);
    links.backing = front->backing;
    links.handles = front->handles;
    return result == 0 ? tierfs_relay_create(&links, &front->relay) : result;
}

static int usage(void)
{
    fprintf(stderr,
            "usage: tierfs-front --state-dir DIR [--workers N] [--report FD] -- ENGINE [ARGUMENT...]\n");
    return 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"state-dir", required_argument, NULL, 's'},
                                            {"workers", required_argument, NULL, 'w'},
                                            {"report", required_argument, NULL, 'r'},
                                            {NULL, 0, NULL, 0}};
    /* Not on the stack of main alone: threads use it until the process ends. */
    static struct front front = {.report = -1, .workers = 2};
    int option;

    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (option == 's')
            front.state_dir = optarg;
        else if (option == 'w')
            front.workers = (unsigned)strtoul(optarg, NULL, 10);
        else if (option == 'r')
            front.report = (int)strtol(optarg, NULL, 10);
        else
            return usage();
    }
    if (front.state_dir == NULL || optind >= argc || front.workers < 1 || front.workers > MAX_WORKERS)
        return usage();
    front.command = argv + optind;
    int result = prepare(&front);
    if (result == 0)
        result = start_engine(&front);
    if (result < 0) {
        tierfs_error("the front cannot start  reason=\"%s\"", strerror(-result));
        return EXIT_FAILED;
    }
    return run(&front);
}
