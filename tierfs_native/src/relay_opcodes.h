/*
 * What becomes of a request, by its opcode: whether it is answered, which way it goes to the engine, and what the relay
 * itself reads of it. Of constants alone: any thread, no lock.
 */
#pragma once

#include "abi.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Carries a number by which an engine can tell that it has done it already. */
static inline bool tierfs_opcode_changes_names(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_SYMLINK:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_UNLINK:
    case FUSE_RMDIR:
    case FUSE_RENAME:
    case FUSE_RENAME2:
    case FUSE_LINK:
    case FUSE_CREATE:
    case FUSE_REMOVEXATTR:
        return true;
    default:
        return false;
    }
}

static inline bool tierfs_opcode_has_no_answer(uint32_t opcode)
{
    return opcode == FUSE_FORGET || opcode == FUSE_BATCH_FORGET || opcode == FUSE_INTERRUPT;
}

/* pyfuse3 would answer ENOSYS, which the kernel remembers for as long as the mount lives. */
static inline bool tierfs_opcode_is_extra(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_READDIR: /* pyfuse3 has READDIRPLUS alone; of a snapshot, all others are answered here */
    case FUSE_FALLOCATE:
    case FUSE_LSEEK:
    case FUSE_COPY_FILE_RANGE:
    case FUSE_COPY_FILE_RANGE_64:
    case FUSE_TMPFILE:
        return true;
    default:
        return false;
    }
}

/* What ends with the commit of one change in the namespace. */
static inline bool tierfs_opcode_is_about_names(uint32_t opcode)
{
    return opcode == FUSE_CREATE || opcode == FUSE_UNLINK || opcode == FUSE_RENAME || opcode == FUSE_RENAME2;
}

/* What the relay itself reads of a request, behind the header. */
static inline size_t tierfs_opcode_body_needed(uint32_t opcode)
{
    switch (opcode) {
    case FUSE_OPEN:
    case FUSE_OPENDIR:
        return sizeof(struct fuse_open_in);
    case FUSE_CREATE:
    case FUSE_TMPFILE:
        return sizeof(struct fuse_create_in);
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
        return sizeof(struct fuse_release_in);
    case FUSE_INIT:
        return sizeof(struct fuse_init_in);
    case FUSE_INTERRUPT:
        return sizeof(struct fuse_interrupt_in);
    case FUSE_READ:
        return sizeof(struct fuse_read_in);
    default:
        return 0;
    }
}
