/* Bodies of messages: what is in them, and bodies that end too early. */
#include "messages.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* In a block of exactly that size, so that a sanitizer sees the first byte too many. */
static char *body_of(const void *data, size_t bytes)
{
    char *body = malloc(bytes + !bytes);

    assert(body != NULL);
    memcpy(body, data, bytes);
    return body;
}

static void test_mount(void)
{
    static const char said[] = "/mnt/data\0tierfs\0rw,allow_other";
    struct tierfs_mount_message message;
    char *body = body_of(said, sizeof said);

    assert(tierfs_message_mount(body, sizeof said, &message) == 0);
    assert(strcmp(message.mountpoint, "/mnt/data") == 0 && strcmp(message.name, "tierfs") == 0);
    assert(strcmp(message.options, "rw,allow_other") == 0);
    free(body);
    for (size_t bytes = 0; bytes < sizeof said; bytes++) {
        body = body_of(said, bytes);
        assert(tierfs_message_mount(body, bytes, &message) == -EPROTO);
        free(body);
    }
}

static void test_view(void)
{
    static const char tiers[] = "m/dev/shm/tier\0d/var/cache/tier";
    struct tierfs_view_settings settings = {.ttl_ns = 7, .answers = 1}, said;
    char all[sizeof settings + sizeof tiers];
    size_t position;
    const char *root;
    bool is_memory;

    memcpy(all, &settings, sizeof settings);
    memcpy(all + sizeof settings, tiers, sizeof tiers);
    char *body = body_of(all, sizeof all);
    assert(tierfs_message_view(body, sizeof all, &said, &position) == 0 && said.ttl_ns == 7);
    assert(tierfs_message_tier(body, sizeof all, &position, &root, &is_memory) == 1);
    assert(is_memory && strcmp(root, "/dev/shm/tier") == 0);
    assert(tierfs_message_tier(body, sizeof all, &position, &root, &is_memory) == 1);
    assert(!is_memory && strcmp(root, "/var/cache/tier") == 0);
    assert(tierfs_message_tier(body, sizeof all, &position, &root, &is_memory) == 0);
    assert(tierfs_message_view(body, sizeof settings - 1, &said, &position) == -EPROTO);
    free(body);
}

/* An empty string has no path behind its letter: the body may end there. */
static void test_tier_that_is_not_one(void)
{
    static const struct {
        const char *body;
        size_t bytes;
    } wrong[] = {{"", 1}, {"m", 2}, {"d/without an end", 16}};

    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        char *body = body_of(wrong[i].body, wrong[i].bytes);
        const char *root;
        size_t position = 0;
        bool is_memory;

        assert(tierfs_message_tier(body, wrong[i].bytes, &position, &root, &is_memory) == -EPROTO);
        free(body);
    }
}

int main(void)
{
    test_mount();
    test_view();
    test_tier_that_is_not_one();
    return 0;
}
