/*
 * Many files at once, from the tier directories of one mount into one piece of memory, without FUSE.
 *
 * The bytes of a file are those that open and read through the mount would have given at some moment during the
 * call; what cannot be known to be so is not answered, and the caller asks the mount. Why each step may be believed:
 *
 *   names    Resolved in one snapshot of the namespace, through valid records only: those that the engine itself
 *            would answer from without asking the store. Symbolic links are left to the mount.
 *   access   As the kernel checks it for the mount: search permission of every directory, read permission of the
 *            file, from the same mode bits.
 *   bytes    The content of an inode that is not being written (DATA_LOCAL) is immutable, and its blocks are where
 *            the committed index of a tier says; see batch_index.h.
 *   after    A clean file that is about to be written gets DATA_LOCAL and another content id in the namespace before
 *            its first byte changes; so records that are the same in a snapshot taken after the read say that the
 *            bytes were still those of the content. The same goes for the index and punched holes. A content's own
 *            file must besides still be at its path: what was renamed away may have been written meanwhile.
 *   device   Bytes that come from the page cache are believed, as the engine does; what had to be read from the
 *            device must match its checksums.
 *
 * A batch belongs to one process: a child of fork must leave its parent's alone and make its own. Lanes may be used
 * by one thread each at a time. Functions return 0 or -errno where they return int.
 */
#pragma once

#include "batch_index.h"
#include "batch_ring.h"
#include "view.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define TIERFS_BATCH_TIERS 8
#define TIERFS_BATCH_GROUPS 256

/* How a file of a batch is to be had. The order is that of outcome_names in batch_module.c. */
enum tierfs_outcome {
    TIERFS_LOCAL, /* its bytes are in memory */
    TIERFS_ELSEWHERE, /* the path is not below this mount, or has parts like `..` */
    TIERFS_UNKNOWN_NAME, /* no record of the name that may still be believed */
    TIERFS_NOT_A_FILE, /* a directory, a symbolic link (also on the way)... */
    TIERFS_BEING_WRITTEN, /* its bytes are only here, and may be changing */
    TIERFS_NO_ACCESS, /* the caller may not read it, or that could not be established */
    TIERFS_ABSENT, /* the committed indexes do not have all of it */
    TIERFS_UNVERIFIED, /* blocks from before an unclean reboot */
    TIERFS_CHANGED, /* renamed, written or evicted during the call */
    TIERFS_UNREADABLE, /* the tier's file system failed, or a checksum did not match */
    TIERFS_REPLACED, /* the name means another inode than the caller expects */
    TIERFS_OUTCOMES
};

struct tierfs_batch_tier {
    int directory; /* descriptor of its root */
    bool is_memory; /* a tmpfs: no read waits for a device */
    struct tierfs_index *index;
};

/* One mount, as this process sees it. Nothing in it changes while lanes are open. */
struct tierfs_batch {
    struct tierfs_view *view;
    uint32_t owner; /* who mounted; only this user's processes can read the tiers */
    size_t tier_count;
    struct tierfs_batch_tier tiers[TIERFS_BATCH_TIERS]; /* fast to slow */
};

/* Who asks. overrides: has the capabilities that let root read anything. */
struct tierfs_caller {
    uint32_t uid, gid;
    bool overrides;
    bool too_many_groups;
    size_t group_count;
    gid_t groups[TIERFS_BATCH_GROUPS];
};

struct tierfs_wanted {
    const char *path; /* below the mountpoint, without a slash in front; not terminated */
    size_t path_bytes;
    uint64_t expected_ino; /* 0: any */
    /* set by tierfs_batch_plan: */
    enum tierfs_outcome outcome;
    uint64_t ino;
    uint64_t size_bytes;
    uint8_t content_id[16];
    size_t first_piece, piece_count;
    /* set by the caller between plan and read: */
    char *destination;
};

struct tierfs_lane; /* what one thread needs */

int tierfs_lane_open(const struct tierfs_batch *batch, struct tierfs_lane **lane);
void tierfs_lane_close(struct tierfs_lane *lane);

/* The credentials of the calling thread, as the kernel would use them now. */
void tierfs_caller_now(struct tierfs_caller *caller, bool believe_capabilities);

/*
 * Resolves names, and finds where the bytes are. Files with outcome TIERFS_LOCAL afterwards want size_bytes of memory.
 * names_only: bytes are not looked for.
 */
int tierfs_batch_plan(struct tierfs_lane *lane, const struct tierfs_caller *caller,
                      struct tierfs_wanted *files, size_t count, bool names_only);

/* Reads the files that are local by the plan; the outcome of those that turned out not to be is changed. */
void tierfs_batch_read(struct tierfs_lane *lane, struct tierfs_wanted *files, size_t count);

/* Whether the lane has an io_uring. */
bool tierfs_lane_has_ring(const struct tierfs_lane *lane);
