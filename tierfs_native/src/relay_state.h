/*
 * The state of a relay, for its parts alone: relay.c (one engine after another), relay_request.c (what the kernel asks),
 * relay_send.c (what goes to the engine), relay_answer.c (what comes from it), relay_open.c (what is open).
 *
 * links and notifications never change, and what tierfs_relay_lists_plainly and its like set does not after INIT; all
 * else is read and written under the lock. `changed` is signalled for every change that somebody waits for: a request
 * that is to be sent, one that is done with, an engine that has come or gone.
 *
 * The sockets are closed by tierfs_relay_engine_ended alone, once no thread sends or reads any more; so whoever has been
 * counted in `senders` may use their numbers without the lock. With the lock held a message is sent only if that does
 * not wait; INIT, to an engine that gets nothing else before, is the exception.
 */
#pragma once

#include "notifications.h"
#include "pending.h"
#include "relay.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TIERFS_MESSAGE_MAX_BYTES (1024u * 1024u + 64u * 1024u)
#define TIERFS_NAMES_MAX_BYTES 65536u

struct tierfs_relay {
    struct tierfs_relay_links links;
    struct tierfs_notifications *notifications;
    pthread_mutex_t lock; /* guards all below, but for the two buffers */
    pthread_cond_t changed;
    struct tierfs_pending pending;
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
    char *answer; /* TIERFS_MESSAGE_MAX_BYTES: of the thread that gets the answers */
    char *names_answer; /* TIERFS_NAMES_MAX_BYTES: of the one that gets those about names */
};

/* Nothing comes from this engine any more: what it has not answered goes to the next one. By the thread that saw it. */
void tierfs_relay_engine_ended(struct tierfs_relay *relay);
