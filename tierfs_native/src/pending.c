#include "pending.h"

#include <stdlib.h>
#include <string.h>

static struct tierfs_request **bucket_of(struct tierfs_pending *pending, uint64_t unique)
{
    return &pending->buckets[(unique * 0x9E3779B97F4A7C15u >> 40) % TIERFS_PENDING_BUCKETS];
}

struct tierfs_request *tierfs_pending_add(struct tierfs_pending *pending, uint64_t unique,
                                          const void *message, size_t bytes,
                                          const struct tierfs_origin *origin)
{
    struct tierfs_request **bucket = bucket_of(pending, unique);
    struct tierfs_request *request = malloc(sizeof *request + bytes);

    if (request == NULL)
        return NULL;
    *request = (struct tierfs_request){.next_in_bucket = *bucket,
                                       .earlier = pending->last,
                                       .unique = unique,
                                       .origin = origin,
                                       .bytes = (uint32_t)bytes};
    memcpy(request->message, message, bytes);
    *bucket = request;
    if (pending->last != NULL)
        pending->last->later = request;
    else
        pending->first = request;
    pending->last = request;
    if (pending->unsent == NULL)
        pending->unsent = request;
    pending->count++;
    pending->bytes += bytes;
    return request;
}

struct tierfs_request *tierfs_pending_find(struct tierfs_pending *pending, uint64_t unique)
{
    struct tierfs_request *request = *bucket_of(pending, unique);

    while (request != NULL && request->unique != unique)
        request = request->next_in_bucket;
    return request;
}

static void skip_sent(struct tierfs_pending *pending)
{
    while (pending->unsent != NULL && (pending->unsent->sent || pending->unsent->sending))
        pending->unsent = pending->unsent->later;
}

void tierfs_pending_remove(struct tierfs_pending *pending, struct tierfs_request *request)
{
    struct tierfs_request **link = bucket_of(pending, request->unique);

    while (*link != request)
        link = &(*link)->next_in_bucket;
    *link = request->next_in_bucket;
    if (pending->unsent == request) {
        pending->unsent = request->later;
        skip_sent(pending);
    }
    if (request->earlier != NULL)
        request->earlier->later = request->later;
    else
        pending->first = request->later;
    if (request->later != NULL)
        request->later->earlier = request->earlier;
    else
        pending->last = request->earlier;
    pending->count--;
    pending->bytes -= request->bytes;
    request->answered = true;
    if (!request->sending)
        free(request);
}

void tierfs_pending_sent(struct tierfs_pending *pending, struct tierfs_request *request, bool went)
{
    request->sending = false;
    if (request->answered) {
        free(request);
        return;
    }
    request->was_sent = request->was_sent || went;
    went = went && !request->again;
    request->again = false;
    request->sent = went;
    if (!went)
        pending->unsent = pending->first;
    skip_sent(pending);
}

void tierfs_pending_rewind(struct tierfs_pending *pending)
{
    for (struct tierfs_request *request = pending->first; request != NULL; request = request->later)
        request->sent = false;
    pending->unsent = pending->first;
}
