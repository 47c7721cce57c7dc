#define _GNU_SOURCE
#include "front_serving.h"

#include "disk.h"
#include "front_channel.h"
#include "log.h"
#include "messages.h"

#include <stdio.h>
#include <string.h>

/* A read from the device that could not be answered. */
static void relay_read(void *context, const void *message, size_t bytes, const struct tierfs_origin *origin)
{
    struct tierfs_front *front = context;

    tierfs_small_missed(front->small);
    tierfs_relay_request(front->relay, message, bytes, origin);
}

static void make_disk(struct tierfs_front *front)
{
    const struct tierfs_disk_links links = {.relay = relay_read, .context = front};
    struct tierfs_disk *disk = NULL;
    int result = tierfs_disk_create(&links, front->reading, false, &disk);

    if (result < 0)
        tierfs_warning("who reads requests also waits for the device  reason=\"%s\"", strerror(-result));
    else
        tierfs_small_set_disk(front->small, disk);
}

/* The tiers from which small files can be read: strings behind the settings, each a letter and a path. */
static void make_small(struct tierfs_front *front, const struct tierfs_packet *packet, size_t position)
{
    const char *root;
    bool is_memory;
    int more = 1;
    int result = tierfs_reading_create(&front->reading);

    while (result == 0 && more > 0) {
        more = tierfs_message_tier(packet->body, packet->header.body_bytes, &position, &root, &is_memory);
        result = more > 0 ? tierfs_reading_add_tier(front->reading, root, is_memory) : more;
    }
    if (result == 0)
        result =
            tierfs_small_create(front->backing, front->reading, front->workers + TIERFS_URING_MAX_THREADS,
                                front->workers - 1, &front->small);
    if (result < 0)
        tierfs_warning("the engine reads small files  reason=\"%s\"", strerror(-result));
    else
        tierfs_small_on_miss(front->small, tierfs_front_tell_touched, front);
    if (result < 0)
        return;
    make_disk(front);
    tierfs_relay_takes_places(front->relay);
}

static void tell_of_noopen(void *context)
{
    (void)context;
    tierfs_info("from now on the kernel opens files without asking");
}

static void make_noopen(struct tierfs_front *front, const struct tierfs_view_settings *said)
{
    int result;

    if (said->read_only == 0)
        return;
    result = tierfs_noopen_create((enum tierfs_open_mode)said->open_mode, front->backing, &front->noopen);
    if (result < 0)
        tierfs_warning("every open is answered  reason=\"%s\"", strerror(-result));
    else
        tierfs_noopen_on_begin(front->noopen, tell_of_noopen, front);
    tierfs_relay_truncates_apart(front->relay);
}

void tierfs_front_begin_serving(struct tierfs_front *front, const struct tierfs_packet *packet)
{
    struct tierfs_view_settings said;
    size_t tiers;
    char path[4096];
    int used = snprintf(path, sizeof path, "%s/namespace.lmdb", front->state_dir);

    if (tierfs_message_view(packet->body, packet->header.body_bytes, &said, &tiers) < 0 || used < 0 ||
        (size_t)used >= sizeof path)
        return;
    if (said.answers == 0 || front->view != NULL)
        return;
    const struct tierfs_answer_settings settings = {
        .ttl_ns = said.ttl_ns,
        .negative_ttl_ns = said.negative_ttl_ns,
        .uid = said.uid,
        .gid = said.gid,
        .file_mode = said.file_mode,
        .dir_mode = said.dir_mode,
        .read_only = said.read_only != 0,
        .close_waits = said.close_waits != 0,
    };
    struct tierfs_answers *answers = NULL;
    int result = tierfs_view_open(path, &front->view);
    if (result == 0)
        result = tierfs_answers_open(&settings, &answers);
    if (result < 0) {
        tierfs_warning("the front cannot read the namespace; the engine answers all  reason=\"%s\"",
                       strerror(-result));
        return;
    }
    tierfs_relay_lists_plainly(front->relay);
    if (!said.close_waits)
        tierfs_relay_closes_untold(front->relay);
    make_small(front, packet, tiers);
    make_noopen(front, &said);
    front->wants_ring = said.transport == TIERFS_TRANSPORT_RING;
    atomic_store_explicit(&front->answers, answers, memory_order_release);
}

long tierfs_front_read_placed(void *context, const void *body, size_t body_bytes, char *out,
                              size_t out_capacity)
{
    const struct tierfs_front *front = context;

    return tierfs_placed_read(front->reading, front->place_mark, body, body_bytes, out, out_capacity);
}
