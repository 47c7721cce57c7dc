#define _GNU_SOURCE
#include "relay_open.h"

#include "log.h"

#include <fcntl.h>

static bool opens_to_write(uint32_t flags)
{
    return (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) != 0;
}

int tierfs_relay_open_begins(struct tierfs_relay *relay, const struct fuse_in_header *header)
{
    const struct fuse_open_in *open = (const void *)(header + 1);

    return tierfs_backing_open_begins(relay->links.backing, header->nodeid, opens_to_write(open->flags));
}

void tierfs_relay_open_mark(struct tierfs_request *request, bool is_passed)
{
    struct fuse_open_in *open = (void *)(request->message + sizeof(struct fuse_in_header));

    open->flags &= ~TIERFS_OPEN_PASSED;
    if (is_passed)
        open->flags |= TIERFS_OPEN_PASSED;
}

void tierfs_relay_open_failed(struct tierfs_relay *relay, const struct fuse_in_header *header)
{
    const struct fuse_open_in *open = (const void *)(header + 1);

    tierfs_backing_open_failed(relay->links.backing, header->nodeid, opens_to_write(open->flags));
}

bool tierfs_relay_open_answered(struct tierfs_relay *relay, const struct tierfs_request *request,
                                struct fuse_out_header *header, size_t bytes, struct tierfs_handle *handle)
{
    const struct fuse_in_header *asked = (const void *)request->message;
    const struct fuse_open_in *in = (const void *)(asked + 1);
    bool is_new = asked->opcode == FUSE_CREATE || asked->opcode == FUSE_TMPFILE;
    size_t before = is_new ? sizeof(struct fuse_entry_out) : 0;
    struct fuse_open_out *out = (void *)((char *)(header + 1) + before);
    bool is_open = asked->opcode == FUSE_OPEN;
    bool writes = opens_to_write(in->flags);
    bool wanted = asked->opcode != FUSE_OPENDIR;
    int32_t id = 0;

    if (header->error != 0 || bytes < sizeof *header + before + sizeof *out) {
        if (is_open)
            tierfs_backing_open_failed(relay->links.backing, asked->nodeid, writes);
        return false;
    }
    *handle = (struct tierfs_handle){
        .fh = out->fh, .ino = asked->nodeid, .open_flags = in->flags, .uid = asked->uid};
    handle->open_flags &= ~TIERFS_OPEN_PASSED;
    bool tells_close = wanted && (out->open_flags & TIERFS_OPEN_TELL_CLOSE) != 0;
    wanted = wanted && (out->open_flags & TIERFS_OPEN_MAY_PASS) != 0;
    /* Who brings the answer to TMPFILE, which comes on the channel, is reading the channel. */
    if (wanted && asked->opcode != FUSE_TMPFILE)
        relay->links.read_channel(relay->links.context);
    if (is_new) {
        handle->ino = ((struct fuse_entry_out *)(header + 1))->nodeid;
        id = tierfs_backing_created(relay->links.backing, handle->ino, wanted);
    } else if (is_open) {
        id = tierfs_backing_open_ends(relay->links.backing, asked->nodeid, writes, wanted);
    } else {
        handle->kind = TIERFS_HANDLE_DIRECTORY;
    }
    if (id != 0) {
        handle->kind = TIERFS_HANDLE_PASSTHROUGH;
        out->open_flags = (out->open_flags & FOPEN_NOFLUSH) | FOPEN_PASSTHROUGH;
        out->backing_id = id;
        if (tells_close)
            tierfs_backing_tell_close(relay->links.backing, handle->ino);
        else if (relay->closes_untold) /* what was stored into a mapping is in the file already */
            out->open_flags |= FOPEN_NOFLUSH;
    }
    if (asked->opcode != FUSE_OPENDIR)
        out->open_flags &= ~(TIERFS_OPEN_MAY_PASS | TIERFS_OPEN_TELL_CLOSE);
    if (tierfs_handles_add(relay->links.handles, handle) < 0)
        tierfs_warning("no memory to remember an open file; it will not outlive the engine");
    return true;
}

void tierfs_relay_open_undo(struct tierfs_relay *relay, const struct tierfs_handle *handle, uint64_t unique)
{
    struct {
        struct fuse_in_header header;
        struct fuse_release_in release;
    } message = {0};

    message.header.len = sizeof message;
    message.header.opcode = (handle->kind & TIERFS_HANDLE_DIRECTORY) != 0 ? FUSE_RELEASEDIR : FUSE_RELEASE;
    /* The kernel's are even, and those of its interrupts are odd without the highest bit. */
    message.header.unique = unique | UINT64_C(1) << 63;
    message.header.nodeid = handle->ino;
    message.release.fh = handle->fh;
    message.release.flags = handle->open_flags;
    tierfs_relay_request(relay, &message, sizeof message, NULL);
}

void tierfs_relay_open_released(struct tierfs_relay *relay, const struct fuse_in_header *header)
{
    const struct fuse_release_in *release = (const void *)(header + 1);

    if (tierfs_handles_remove(relay->links.handles, release->fh) && header->opcode == FUSE_RELEASE)
        tierfs_backing_released(relay->links.backing, header->nodeid);
}
