/*
 * Bodies of messages of the engine: no string in them leads out of the body.
 *
 * An input: one byte that chooses the kind, then the body.
 */
#include "messages.h"

#include <assert.h>
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The string lies in the body, its end too. Returns where the next one would begin. */
static size_t check_string(const char *body, size_t bytes, const char *string)
{
    assert(string >= body && (size_t)(string - body) < bytes);
    size_t left = bytes - (size_t)(string - body);
    size_t length = strnlen(string, left);
    assert(length < left);
    return (size_t)(string - body) + length + 1;
}

static void take_mount(const char *body, size_t bytes)
{
    struct tierfs_mount_message said;

    if (tierfs_message_mount(body, bytes, &said) < 0)
        return;
    assert(said.mountpoint == body);
    assert(said.name == body + check_string(body, bytes, said.mountpoint));
    assert(said.options == body + check_string(body, bytes, said.name));
    (void)check_string(body, bytes, said.options);
}

static void take_view(const char *body, size_t bytes)
{
    struct tierfs_view_settings said;
    size_t position;
    const char *root;
    bool is_memory;
    int more;

    if (tierfs_message_view(body, bytes, &said, &position) < 0) {
        assert(bytes < sizeof said);
        return;
    }
    assert(memcmp(&said, body, sizeof said) == 0);
    while ((more = tierfs_message_tier(body, bytes, &position, &root, &is_memory)) > 0) {
        assert(root > body && is_memory == (root[-1] == 'm') && root[0] != '\0');
        assert(position == check_string(body, bytes, root));
    }
    assert(more == -EPROTO || position == bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *body;

    if (size == 0)
        return 0;
    body = malloc(size - 1 + (size == 1)); /* what is read behind its end is found */
    assert(body != NULL);
    if (size > 1)
        memcpy(body, data + 1, size - 1);
    if (data[0] % 2 == 0)
        take_mount(body, size - 1);
    else
        take_view(body, size - 1);
    free(body);
    return 0;
}
