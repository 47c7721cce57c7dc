/*
 * The head of a reply to a ranged GET, as far as it has to be understood to know that the body is what was asked for.
 * What is unusual in any way is refused, not guessed: whoever asked has another way, which understands all of it.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TIERFS_REPLY_HEAD_BYTES 8192u /* no longer head is taken */

/* What the body has to be. */
struct tierfs_reply_wanted {
    uint64_t offset; /* in the object */
    uint64_t length; /* not 0 */
    const char *etag; /* without quotes */
    size_t etag_bytes;
};

/*
 * Looks at what has come so far. Returns the size of the head once it is whole and a body of exactly the wanted bytes
 * follows, uncoded; 0 if more has to come; -EPROTO in any other case. *keeps_open: the connection can be used again.
 */
long tierfs_reply_check(const char *data, size_t bytes, const struct tierfs_reply_wanted *wanted,
                        bool *keeps_open);
