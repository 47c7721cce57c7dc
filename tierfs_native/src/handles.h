/* What applications have open, as the engine numbered it: handed to the next engine when one dies. */
#pragma once

#include "channel.h"

#include <stddef.h>
#include <stdint.h>

struct tierfs_handles;

int tierfs_handles_create(struct tierfs_handles **handles); /* 0 or -ENOMEM */
void tierfs_handles_destroy(struct tierfs_handles *handles);

/* Remember an open file or directory. 0 or -ENOMEM. */
int tierfs_handles_add(struct tierfs_handles *handles, const struct tierfs_handle *handle);

/* Forget it. True if it was known. */
int tierfs_handles_remove(struct tierfs_handles *handles, uint64_t fh);

/* A copy of all of them, to be freed. 0 or -ENOMEM. */
int tierfs_handles_copy(struct tierfs_handles *handles, struct tierfs_handle **copy, size_t *count);
