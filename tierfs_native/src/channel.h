/*
 * Messages between the front and the engine, beside the FUSE requests: one SOCK_SEQPACKET packet each, a fixed
 * header and a body, little endian, both ends on one machine and of one version. tierfs/mount/channel.py is the
 * other end and has the same numbers.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TIERFS_CHANNEL_VERSION 1u
#define TIERFS_CHANNEL_MAX_BYTES 65536u
#define TIERFS_HANDLES_PER_MESSAGE 1024u

enum tierfs_message {
    /* front to engine */
    TIERFS_HELLO =
        1,     /* value: TIERFS_HELLO_*; body: struct tierfs_hello; then HANDLES messages, then HELLO_END */
    TIERFS_HANDLES = 2,   /* body: struct tierfs_handle[]: what applications have open */
    TIERFS_HELLO_END = 3,
    TIERFS_MOUNTED = 4,   /* value: 0 or an errno; answers MOUNT */
    TIERFS_UNMOUNTED = 5, /* value: 0 or an errno; answers UNMOUNT */
    TIERFS_TOUCHED = 8, /* body: uint64_t[]: inodes that were read without the engine */
    TIERFS_UNKNOWN = 26, /* value: an inode that the kernel was to drop what it knows of, and does not know */
    TIERFS_GONE = 6, /* the kernel has let go of the mount */
    TIERFS_COUNTS = 7, /* body: struct tierfs_counts; answers COUNT */
    TIERFS_EXTRA = 9, /* body: a FUSE request that pyfuse3 does not know, as the kernel sent it */
    TIERFS_EXTRA_INTERRUPT = 10, /* value: the unique of such a request; who waits for it has got a signal */
    TIERFS_PASSED = 13, /* body: struct tierfs_passed_file[]: after HANDLES */
    /* engine to front */
    TIERFS_MOUNT = 16, /* body: mountpoint NUL file system name NUL options NUL */
    TIERFS_ATTACH = 17, /* the engine takes requests now: replay INIT and what has no answer yet */
    TIERFS_UNMOUNT = 18, /* value: flags of umount2(2) */
    TIERFS_READY = 19, /* from now on a dead engine is started again */
    TIERFS_STOPPING = 20, /* the engine is about to end on purpose */
    TIERFS_BACKING = 21, /* value: inode; one descriptor: the file that holds all its bytes */
    TIERFS_COUNT = 22,
    TIERFS_VIEW = 23, /* before MOUNT; body: struct tierfs_view_settings: the front may look names up */
    TIERFS_HOLD =
        25, /* value: 1: the engine decides when who writes to a passed-through file goes on; 0: nobody waits */
    TIERFS_EXTRA_REPLY = 24, /* value: unique; body: int32_t 0 or -errno, then the body of the answer */
};

#define TIERFS_HELLO_REATTACHED 1u /* the mount is there; an earlier engine has served it */
#define TIERFS_HELLO_UNTOLD 2u /* files may be open that are not among the handles (see noopen.h) */

struct tierfs_channel_header {
    uint16_t version;
    uint16_t kind;
    uint32_t body_bytes;
    uint64_t value;
};

struct tierfs_hello {
    uint32_t front_pid;
    uint32_t engine_starts; /* 1: the first engine of this mount */
    uint8_t place_mark[16]; /* see placed.h */
};

#define TIERFS_HANDLE_DIRECTORY 1u
#define TIERFS_HANDLE_PASSTHROUGH 2u
#define TIERFS_HANDLE_FRONT \
    4u /* opened by the front itself; nothing to restore but that the inode is in use */

struct tierfs_handle {
    uint64_t fh; /* as the engine numbered it */
    uint64_t ino;
    uint32_t open_flags; /* of open(2) */
    uint32_t uid;
    uint32_t kind; /* TIERFS_HANDLE_* */
    uint32_t reserved;
};

struct tierfs_passed_file {
    uint64_t ino;
    uint64_t file_device, file_ino; /* of the file that its opens are passed through to */
};

#define TIERFS_TRANSPORT_DEVICE 0u
#define TIERFS_TRANSPORT_RING 1u /* FUSE over io_uring, where the kernel offers it */

struct tierfs_view_settings {
    uint64_t ttl_ns;
    uint64_t negative_ttl_ns;
    uint32_t uid;
    uint32_t gid;
    uint32_t file_mode;
    uint32_t dir_mode;
    uint32_t read_only;
    uint32_t answers; /* 0: every request goes to the engine */
    uint32_t open_mode; /* enum tierfs_open_mode; of a mount that is read-only */
    uint32_t transport; /* TIERFS_TRANSPORT_* */
    uint32_t close_waits; /* close(2) has to wait for the engine (write-through) */
    uint32_t reserved;
};

struct tierfs_counts {
    uint64_t answered;
    uint64_t relayed;
    uint64_t repeated; /* sent again to a later engine */
    uint64_t passthrough_opens;
    uint64_t notifications;
    uint64_t notifications_refused; /* by the kernel, which had forgotten the inode or entry */
    uint64_t opened_here; /* files that are open now, and that no engine knows to be */
    uint32_t passthrough_errno; /* why the kernel refuses passthrough; 0: it does not */
    uint32_t pending;
    uint32_t no_open; /* 1: no-open mode has begun */
    uint32_t ring; /* requests come 0: through /dev/fuse; 1: through io_uring */
    uint32_t ring_errno; /* why not through io_uring, if they should; 0: it was not tried, or it works */
    uint32_t ring_depth; /* requests that one queue takes at a time */
    uint64_t ring_requests;
    uint64_t placed; /* reads for which the engine said where the bytes are (placed.h) */
};

_Static_assert(sizeof(struct tierfs_channel_header) == 16, "channel header");
_Static_assert(sizeof(struct tierfs_hello) == 24, "hello");
_Static_assert(sizeof(struct tierfs_passed_file) == 24, "passed file");
_Static_assert(sizeof(struct tierfs_handle) == 32, "handle");
_Static_assert(sizeof(struct tierfs_view_settings) == 56, "view settings");
_Static_assert(sizeof(struct tierfs_counts) == 96, "counts");

struct tierfs_packet {
    struct tierfs_channel_header header;
    int descriptor; /* -1: none came along; else the receiver closes it */
    char body[TIERFS_CHANNEL_MAX_BYTES];
};

/* flags: of sendmsg(2). 0 or -errno. */
int tierfs_channel_send(int socket, uint16_t kind, uint64_t value, const void *body, size_t body_bytes,
                        int flags);

/* 1: a packet; 0: the other end is gone; -EAGAIN with MSG_DONTWAIT; -EPROTO: not what this version understands. */
int tierfs_channel_receive(int socket, struct tierfs_packet *packet, int flags);
