/*
 * The relay between a kernel and an engine that send anything, in any order, with engines that die.
 *
 * An input: steps of two bytes for what happens, one for the size of a body. It consists of the bytes that follow,
 * which are steps as well, so that short inputs get far. write(2) and ioctl(2) are this
 * file's, and the kernel refuses an answer now and then. After each input everything has been answered, all that was
 * open has been released, and so nothing may be registered with the kernel any more.
 */
#define _GNU_SOURCE
#include "pending.h"
#include "relay.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KERNEL 100001 /* a descriptor that only this file knows */
#define INODES 4u
#define ASKED_MAX 64u
#define MESSAGE_BYTES 70000u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tierfs_relay *relay;
static struct tierfs_backing *backing;
static struct tierfs_handles *handles;
static int engine = -1;  /* its ends of the sockets */
static int channel = -1;
static int names = -1;
static uint64_t last_unique, last_fh;
static uint64_t asked[ASKED_MAX];
static size_t asked_count;
static atomic_int registered;

ssize_t write(int descriptor, const void *data, size_t bytes)
{
    const struct fuse_out_header *header = data;

    if (descriptor == STDERR_FILENO)
        return (ssize_t)bytes; /* the log */
    if (descriptor != KERNEL)
        return syscall(SYS_write, descriptor, data, bytes);
    assert(bytes >= sizeof *header);
    return (ssize_t)bytes;
}

static int take(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    (void)origin;
    assert(message != NULL && bytes >= sizeof(struct fuse_out_header));
    return 0;
}

static int give_up(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    (void)take(origin, message, bytes);
    return -ENOENT;
}

static int refuse(const struct tierfs_origin *origin, const void *message, size_t bytes)
{
    (void)take(origin, message, bytes);
    return -EINVAL;
}

static const struct tierfs_origin kernel = {take}, given_up = {give_up}, refuses = {refuse};

int ioctl(int descriptor, unsigned long request, ...)
{
    (void)descriptor;
    if (request == FUSE_DEV_IOC_BACKING_OPEN)
        return atomic_fetch_add(&registered, 1) + 1;
    assert(request == FUSE_DEV_IOC_BACKING_CLOSE);
    atomic_fetch_sub(&registered, 1);
    return 0;
}

static void read_channel(void *context)
{
    (void)context;
}

static void replace_engine(void)
{
    int requests[2];
    int channels[2];
    int about_names[2];

    if (engine >= 0) {
        close(engine);
        close(channel);
        close(names);
    }
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, requests) == 0);
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, channels) == 0);
    assert(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, about_names) == 0);
    engine = requests[1];
    channel = channels[1];
    names = about_names[1];
    tierfs_relay_connect(relay, requests[0], channels[0], about_names[0]);
    close(channels[0]);
    tierfs_relay_attach(relay);
}

static void prepare(void)
{
    struct tierfs_relay_links links = {.read_channel = read_channel};

    assert(tierfs_backing_create(&backing) == 0 && tierfs_handles_create(&handles) == 0);
    tierfs_backing_set_device(backing, KERNEL);
    links.backing = backing;
    links.handles = handles;
    assert(tierfs_relay_create(&links, &relay) == 0);
    tierfs_relay_set_device(relay, KERNEL);
    replace_engine();
}

/* What the engine has got so far; an INIT that is repeated is answered at once. */
static void drain_engine(void)
{
    static char message[MESSAGE_BYTES];

    const int sockets[] = {engine, channel, names};

    for (size_t socket = 0; socket < 3; socket++)
        for (;;) {
            ssize_t bytes = recv(sockets[socket], message, sizeof message, MSG_DONTWAIT);
            if (bytes <= 0)
                break;
            if (sockets[socket] == channel)
                continue;
            const struct fuse_in_header *header = (const void *)message;
            assert((size_t)bytes >= sizeof *header);
            if (header->opcode == FUSE_INIT) {
                struct fuse_out_header answer = {.len = sizeof answer, .unique = header->unique};
                (void)send(engine, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT);
            }
        }
}

static void from_kernel(const uint8_t *data, size_t bytes, uint8_t choice)
{
    static char message[MESSAGE_BYTES];
    static const struct tierfs_origin *const origins[] = {&kernel, &kernel, &kernel, &given_up, &refuses};
    static const uint8_t opcodes[] = {
        FUSE_OPEN,  FUSE_OPEN,      FUSE_OPEN,   FUSE_RELEASE, FUSE_CREATE,     FUSE_OPENDIR,
        FUSE_INIT,  FUSE_INTERRUPT, FUSE_FORGET, FUSE_MKDIR,   FUSE_RELEASEDIR, FUSE_TMPFILE,
        FUSE_LSEEK, FUSE_WRITE,     FUSE_LOOKUP, FUSE_UNLINK,  FUSE_READ,       FUSE_RENAME2};
    struct fuse_in_header *header = (void *)message;

    if (bytes > sizeof message - sizeof *header)
        bytes = sizeof message - sizeof *header;
    *header = (struct fuse_in_header){
        .len = (uint32_t)(sizeof *header + bytes),
        .opcode = opcodes[choice % sizeof opcodes],
        .unique = last_unique += 2,
        .nodeid = 1 + choice % INODES,
    };
    memcpy(message + sizeof *header, data, bytes);
    if (header->opcode == FUSE_INTERRUPT && asked_count != 0 && bytes >= sizeof(uint64_t))
        memcpy(message + sizeof *header, &asked[choice % asked_count], sizeof(uint64_t));
    if (asked_count < ASKED_MAX && header->opcode != FUSE_INTERRUPT)
        asked[asked_count++] = header->unique;
    tierfs_relay_request(relay, message, sizeof *header + bytes,
                         origins[choice % (sizeof origins / sizeof *origins)]);
}

static void from_engine(const uint8_t *data, size_t bytes, uint8_t choice)
{
    static char message[MESSAGE_BYTES];
    struct fuse_out_header *header = (void *)message;

    if (bytes > sizeof message - sizeof *header)
        bytes = sizeof message - sizeof *header;
    *header = (struct fuse_out_header){.len = (uint32_t)(sizeof *header + bytes)};
    if (choice % 8 != 0 && asked_count != 0)
        header->unique = asked[asked_count - 1 - choice % 16 % asked_count]; /* else a notification */
    header->error = choice % 5 == 0 ? -EIO : 0;
    memcpy(message + sizeof *header, data, bytes);
    /* Numbers of handles are the one thing that an engine is believed: there are no two alike. */
    last_fh++;
    if (bytes >= sizeof last_fh)
        memcpy(message + sizeof *header, &last_fh, sizeof last_fh);
    if (bytes >= sizeof(struct fuse_entry_out) + sizeof last_fh)
        memcpy(message + sizeof *header + sizeof(struct fuse_entry_out), &last_fh, sizeof last_fh);
    if (choice % 7 == 0)
        tierfs_relay_extra_reply(relay, header->unique, message + sizeof *header - sizeof(int32_t),
                                 bytes + sizeof(int32_t));
    else
        (void)send(engine, message, choice % 31 == 0 ? bytes : sizeof *header + bytes,
                   MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Several answers in one packet. Now and then one has a length that it should not have. */
static void from_names(const uint8_t *data, size_t bytes, uint8_t choice)
{
    static char packet[MESSAGE_BYTES];
    size_t used = 0;

    for (unsigned i = 0; i <= choice % 4u && asked_count != 0; i++) {
        struct fuse_out_header header = {.len = (uint32_t)(sizeof header + bytes),
                                         .error = choice % 5 == 0 ? -EEXIST : 0,
                                         .unique = asked[asked_count - 1 - (choice / 4u + i) % asked_count]};
        if (choice % 29 == 0 && bytes >= sizeof header.len)
            memcpy(&header.len, data, sizeof header.len);
        memcpy(packet + used, &header, sizeof header);
        memcpy(packet + used + sizeof header, data, bytes);
        last_fh++;
        if (bytes >= sizeof(struct fuse_entry_out) + sizeof last_fh)
            memcpy(packet + used + sizeof header + sizeof(struct fuse_entry_out), &last_fh, sizeof last_fh);
        used += (sizeof header + bytes + 7) & ~(size_t)7;
    }
    (void)send(names, packet, choice % 31 == 0 ? used / 2 : used, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static uint32_t waiting(void)
{
    struct tierfs_counts counts;

    tierfs_relay_counts(relay, &counts);
    return counts.pending;
}

/* Answer all that waits, then release all that is open: the next input begins from nothing. */
static void settle(void)
{
    struct tierfs_handle *open;
    size_t count;

    replace_engine();
    for (unsigned round = 0; waiting() != 0; round++) {
        static char message[MESSAGE_BYTES];
        struct pollfd polled[] = {{engine, POLLIN, 0}, {channel, POLLIN, 0}, {names, POLLIN, 0}};
        const struct fuse_in_header *header = (const void *)message;
        ssize_t bytes;
        bool is_gone = false;

        assert(round < 100000);
        (void)poll(polled, 3, 10);
        for (size_t i = 0; i < 3; i += 2) {
            bytes = recv(polled[i].fd, message, sizeof message, MSG_DONTWAIT);
            struct fuse_out_header answer = {.len = sizeof answer, .error = -EIO, .unique = header->unique};
            is_gone = is_gone || bytes == 0 ||
                      (bytes >= (ssize_t)sizeof *header &&
                       send(polled[i].fd, &answer, sizeof answer, MSG_NOSIGNAL) < 0);
        }
        if (is_gone)
            replace_engine();
        bytes = recv(channel, message, sizeof message, MSG_DONTWAIT);
        const struct tierfs_channel_header *packet = (const void *)message;
        if (bytes >= (ssize_t)(sizeof *packet + sizeof *header) && packet->kind == TIERFS_EXTRA) {
            const int32_t error = -EIO;
            header = (const void *)(message + sizeof *packet);
            tierfs_relay_extra_reply(relay, header->unique, &error, sizeof error);
        }
    }
    assert(tierfs_handles_copy(handles, &open, &count) == 0);
    for (size_t i = 0; i < count; i++) {
        struct {
            struct fuse_in_header header;
            struct fuse_release_in release;
        } message = {.header = {.len = sizeof message, .nodeid = open[i].ino, .unique = last_unique += 2},
                     .release = {.fh = open[i].fh}};
        message.header.opcode =
            (open[i].kind & TIERFS_HANDLE_DIRECTORY) != 0 ? FUSE_RELEASEDIR : FUSE_RELEASE;
        tierfs_relay_request(relay, &message, sizeof message, &kernel);
    }
    free(open);
    asked_count = 0;
    if (count != 0)
        settle();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (relay == NULL)
        prepare();
    while (size >= 3) {
        const uint8_t what = data[0];
        const uint8_t choice = data[1];
        size_t bytes = data[2];

        data += 3;
        size -= 3;
        if (bytes > size)
            bytes = size;
        if (what % 8 < 3)
            from_kernel(data, bytes, choice);
        else if (what % 8 < 5)
            from_engine(data, bytes, choice);
        else if (what % 8 == 5)
            from_names(data, bytes, choice);
        else if (what % 8 == 6)
            tierfs_backing_lend(backing, 1 + choice % INODES, dup(STDIN_FILENO));
        else if (choice % 4 == 0)
            replace_engine();
        drain_engine();
    }
    settle();
    assert(atomic_load(&registered) == 0);
    return 0;
}
