/*
 * Requests that the engine has to answer, over a SOCK_SEQPACKET socket whose other end pyfuse3 takes for /dev/fuse.
 *
 * Every request is kept until its answer has come. When an engine dies, the next one gets FUSE_INIT again (its answer
 * goes nowhere: the kernel had one) and then all that was kept, in order. Requests that change names carry a number
 * in the place of the caller's pid, the same when they are repeated, so that an engine can tell that it has done
 * them already.
 *
 * tierfs_relay_request is called by the threads that read requests, and never waits for the engine: what the socket
 * has no room for is sent by a thread of the relay. It has three, one that sends (relay_send.c) and two that get answers
 * (relay_answer.c); notifications.c has one more. What is not said to be for any thread belongs to the main thread.
 * Every function takes the lock of relay_state.h for itself.
 */
#pragma once

#include "abi.h"
#include "backing.h"
#include "channel.h"
#include "handles.h"
#include "origin.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In the flags of FUSE_OPEN: the inode is passed through, and so will this open be. */
#define TIERFS_OPEN_PASSED (UINT32_C(1) << 30)
/* In the answer to FUSE_OPEN, in the place of a flag that tierfs has no use for: it may be passed through. */
#define TIERFS_OPEN_MAY_PASS FOPEN_NONSEEKABLE

/* Likewise: if it is passed through, close(2) has to ask the engine (FLUSH). */
#define TIERFS_OPEN_TELL_CLOSE FOPEN_DIRECT_IO

struct tierfs_relay;

struct tierfs_relay_links {
    struct tierfs_backing *backing;
    struct tierfs_handles *handles;
    /* Take in what the engine has sent on the channel so far. Called from the thread that gets the answers. */
    void (*read_channel)(void *context);
    /*
     * The kernel offers FUSE over io_uring; requests and answers have payload_bytes at most. Returns whether it is
     * told that there will be queues; once it has been, begin_ring is called. NULL: it is not told. Called with the
     * lock of the relay held.
     */
    bool (*prepare_ring)(void *context, bool is_offered, size_t payload_bytes);
    void (*begin_ring)(void *context);
    /* As tierfs_placed_read; only after tierfs_relay_takes_places. */
    long (*read_placed)(void *context, const void *body, size_t body_bytes, char *out, size_t out_capacity);
    void *context;
};

int tierfs_relay_create(const struct tierfs_relay_links *links,
                        struct tierfs_relay **relay); /* 0 or -errno */

/* device: of /dev/fuse, for notifications; when it is mounted. */
void tierfs_relay_set_device(struct tierfs_relay *relay, int device);

/* From now on the engine may answer READ with a place (placed.h). */
void tierfs_relay_takes_places(struct tierfs_relay *relay);

/* READDIR without attributes, which pyfuse3 does not know, never comes here: the kernel may choose it. Before INIT. */
void tierfs_relay_lists_plainly(struct tierfs_relay *relay);

/* Who closes a file that is passed through need not ask (FLUSH), unless its open says so. Before INIT. */
void tierfs_relay_closes_untold(struct tierfs_relay *relay);

/*
 * An open that truncates comes here in two parts. Where opens are not asked for, the kernel would believe to have
 * truncated a file that nobody may change. Before INIT.
 */
void tierfs_relay_truncates_apart(struct tierfs_relay *relay);

/*
 * A new engine, which takes no requests yet. The relay closes the sockets; of the channel, on which requests go that
 * pyfuse3 does not know, it makes a descriptor of its own. names: a socket to the thread that commits, for requests that
 * make, move and remove names of files: the same messages as on the first one, but several answers may come in one
 * packet. -1: there is none, and never was one.
 */
void tierfs_relay_connect(struct tierfs_relay *relay, int socket, int channel, int names);

/* The engine takes requests from now on. */
void tierfs_relay_attach(struct tierfs_relay *relay);

/*
 * One request; a copy is made. origin: where the answer goes, an error too (EINVAL: it is too short; ENOMEM); NULL:
 * nowhere. Any thread. Waits only while half a GiB of requests has no answer.
 */
void tierfs_relay_request(struct tierfs_relay *relay, const void *message, size_t bytes,
                          const struct tierfs_origin *origin);

/* The engine's answer to a request that went on the channel: body of TIERFS_EXTRA_REPLY. Any thread, one at a time. */
void tierfs_relay_extra_reply(struct tierfs_relay *relay, uint64_t unique, const void *body, size_t bytes);

void tierfs_relay_counts(struct tierfs_relay *relay, struct tierfs_counts *counts);

/* How many requests the engine of now has answered; after its end, how many it had. */
uint64_t tierfs_relay_answered(struct tierfs_relay *relay);
