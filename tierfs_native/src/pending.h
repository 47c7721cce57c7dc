/* Requests without an answer yet, in the order in which they came. Not locked: the relay does that. */
#pragma once

#include "origin.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TIERFS_PENDING_BUCKETS 4096u

struct tierfs_request {
    struct tierfs_request *next_in_bucket;
    struct tierfs_request *earlier, *later;
    uint64_t unique;
    const struct tierfs_origin *origin; /* NULL: nobody waits */
    bool sent;    /* to the engine of now */
    bool was_sent; /* to any engine */
    bool sending; /* a thread is reading the message: whoever is done frees it */
    bool again;   /* once that is over, it has to be sent once more */
    bool answered;
    bool unanswered; /* nothing comes back: it is done with once it is sent */
    bool interrupted; /* whoever waits for the answer has got a signal */
    bool extra;       /* goes to the engine on the channel: pyfuse3 does not know it */
    bool names;       /* goes to the thread of the engine that commits */
    uint32_t bytes;
    _Alignas(8) char message[]; /* begins with a struct of 8-byte integers */
};

struct tierfs_pending {
    struct tierfs_request *buckets[TIERFS_PENDING_BUCKETS];
    struct tierfs_request *first, *last;
    struct tierfs_request *unsent; /* the first that this engine has not got */
    size_t count;
    size_t bytes;
};

/* A copy of the message, at the end. NULL: no memory. */
struct tierfs_request *tierfs_pending_add(struct tierfs_pending *pending, uint64_t unique,
                                          const void *message, size_t bytes,
                                          const struct tierfs_origin *origin);
struct tierfs_request *tierfs_pending_find(struct tierfs_pending *pending, uint64_t unique);

/* Take it out; it is freed here unless somebody is sending it. */
void tierfs_pending_remove(struct tierfs_pending *pending, struct tierfs_request *request);

/* Its sending is over. */
void tierfs_pending_sent(struct tierfs_pending *pending, struct tierfs_request *request, bool went);

/* Another engine: everything is unsent. No message is being sent meanwhile. */
void tierfs_pending_rewind(struct tierfs_pending *pending);
