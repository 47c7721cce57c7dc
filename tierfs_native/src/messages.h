/* Bodies of messages on the channel, taken apart. Nothing in them is believed to end where it should. */
#pragma once

#include "channel.h"

#include <stdbool.h>
#include <stddef.h>

/* Strings are left pointing into the body. Functions return 0, or -EPROTO: the body is not what it must be. */

struct tierfs_mount_message {
    const char *mountpoint, *name, *options;
};

/* The body of TIERFS_MOUNT. */
int tierfs_message_mount(const char *body, size_t body_bytes, struct tierfs_mount_message *said);

/* The body of TIERFS_VIEW: settings, then tiers from *position on. */
int tierfs_message_view(const char *body, size_t body_bytes, struct tierfs_view_settings *said,
                        size_t *position);

/* The next tier in that body: a letter (m: of memory) and the path of its root. 1: there was one; 0: no more. */
int tierfs_message_tier(const char *body, size_t body_bytes, size_t *position, const char **root,
                        bool *is_memory);
