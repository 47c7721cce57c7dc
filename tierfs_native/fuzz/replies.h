/* What has to be true of every reply, whatever the request and the records were. */
#pragma once

#include "answer.h"

#include <assert.h>
#include <stdlib.h>
#include <sys/stat.h>

static inline void check_attributes(const struct fuse_attr *attr)
{
    assert(tierfs_is_file_type(attr->mode & S_IFMT));
    assert(attr->size <= INT64_MAX);
    assert(attr->atimensec < 1000000000 && attr->mtimensec < 1000000000 && attr->ctimensec < 1000000000);
}

static inline void check_entry(const struct fuse_entry_out *entry)
{
    assert(entry->nodeid == entry->attr.ino);
    assert(entry->entry_valid_nsec < 1000000000 && entry->attr_valid_nsec < 1000000000);
    check_attributes(&entry->attr);
}

static inline void check_listing(const uint8_t *out, size_t bytes, bool plus)
{
    uint64_t cookie = 0;

    for (size_t at = 0; at < bytes;) {
        struct fuse_entry_out entry = {0};
        struct fuse_dirent dirent;
        const char *name;

        if (plus) {
            assert(bytes - at > sizeof(entry));
            memcpy(&entry, out + at, sizeof(entry));
            at += sizeof(entry);
        }
        assert(bytes - at > sizeof(dirent));
        memcpy(&dirent, out + at, sizeof(dirent));
        at += sizeof(dirent);
        assert(dirent.namelen <= bytes - at);
        name = (const char *)out + at;
        assert(tierfs_is_name(name, dirent.namelen));
        assert(dirent.off > cookie && dirent.off <= INT64_MAX && dirent.ino != 0);
        assert(tierfs_is_file_type(dirent.type << 12));
        if (entry.nodeid != 0) {
            check_entry(&entry);
            assert(entry.nodeid == dirent.ino && entry.attr.mode >> 12 == dirent.type);
        }
        cookie = dirent.off;
        at += fuse_align(dirent.namelen);
        assert(at <= bytes);
    }
}

/* Asks, with blocks of exactly the sizes that are told, and checks what comes back. */
static inline long ask_and_check(const struct tierfs_answers *answers, struct tierfs_reader *reader,
                                 int64_t now_ns, const struct fuse_in_header *header, const void *body,
                                 size_t body_bytes, size_t capacity)
{
    uint8_t *copy = malloc(body_bytes + !body_bytes);
    uint8_t *out = malloc(capacity + !capacity);
    long result;

    assert(copy != NULL && out != NULL);
    if (body_bytes != 0)
        memcpy(copy, body, body_bytes);
    result = tierfs_answer_at(answers, reader, now_ns, header, copy, body_bytes, out, capacity);
    assert(result >= -4095 || result == TIERFS_RELAY || result == TIERFS_NO_REPLY);
    assert(result <= 0 || (size_t)result <= capacity);
    if (result > 0) {
        union {
            struct fuse_entry_out entry;
            struct fuse_attr_out attr;
        } reply;

        switch (header->opcode) {
        case FUSE_LOOKUP:
            assert(result == sizeof(reply.entry));
            memcpy(&reply, out, sizeof(reply.entry));
            check_entry(&reply.entry);
            break;
        case FUSE_GETATTR:
            assert(result == sizeof(reply.attr));
            memcpy(&reply, out, sizeof(reply.attr));
            check_attributes(&reply.attr.attr);
            break;
        case FUSE_READDIR:
        case FUSE_READDIRPLUS:
            check_listing(out, (size_t)result, header->opcode == FUSE_READDIRPLUS);
            break;
        default:
            assert(result <= TIERFS_REPLY_BYTES);
        }
    }
    free(copy);
    free(out);
    return result;
}
