#include "messages.h"

#include <errno.h>
#include <string.h>

/* The next of the strings in a body; NULL if it does not end inside it. */
static const char *next_string(const char *body, size_t body_bytes, size_t *position)
{
    const char *start = body + *position;
    const char *end = memchr(start, '\0', body_bytes - *position);

    if (end == NULL)
        return NULL;
    *position += (size_t)(end - start) + 1;
    return start;
}

int tierfs_message_mount(const char *body, size_t body_bytes, struct tierfs_mount_message *said)
{
    size_t position = 0;

    said->mountpoint = next_string(body, body_bytes, &position);
    said->name = said->mountpoint != NULL ? next_string(body, body_bytes, &position) : NULL;
    said->options = said->name != NULL ? next_string(body, body_bytes, &position) : NULL;
    return said->options != NULL ? 0 : -EPROTO;
}

int tierfs_message_view(const char *body, size_t body_bytes, struct tierfs_view_settings *said,
                        size_t *position)
{
    if (body_bytes < sizeof *said)
        return -EPROTO;
    memcpy(said, body, sizeof *said);
    *position = sizeof *said;
    return 0;
}

int tierfs_message_tier(const char *body, size_t body_bytes, size_t *position, const char **root,
                        bool *is_memory)
{
    const char *tier;

    if (*position == body_bytes)
        return 0;
    tier = next_string(body, body_bytes, position);
    if (tier == NULL || tier[0] == '\0' || tier[1] == '\0')
        return -EPROTO;
    *is_memory = tier[0] == 'm';
    *root = tier + 1;
    return 1;
}
