/*
 * No-open mode with requests of any kind and length: nothing beyond the body is read or written, and of the body only
 * a handle that is 0 is changed.
 *
 * An input: one byte that chooses the opcode among those that are looked at, one for the inode, then the body.
 */
#include "noopen.h"

#include "answer.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t opcodes[] = {
        FUSE_OPEN,  FUSE_READ,      FUSE_WRITE,           FUSE_FLUSH,
        FUSE_FSYNC, FUSE_LSEEK,     FUSE_COPY_FILE_RANGE, FUSE_COPY_FILE_RANGE_64,
        FUSE_IOCTL, FUSE_FALLOCATE, FUSE_RELEASE};
    static struct tierfs_noopen *noopens[3]; /* for each mode one, over all inputs */

    if (size < 2)
        return 0;
    if (noopens[0] == NULL) {
        struct tierfs_backing *backing;
        assert(tierfs_backing_create(&backing) == 0);
        for (int mode = TIERFS_OPEN_ASK; mode <= TIERFS_OPEN_NONE; mode++)
            assert(tierfs_noopen_create((enum tierfs_open_mode)mode, backing, &noopens[mode]) == 0);
    }
    const struct fuse_in_header header = {.opcode = opcodes[data[0] / 3 % sizeof opcodes],
                                          .nodeid = data[1] % 2 != 0 ? data[1] : TIERFS_FH_FRONT | data[1]};
    size -= 2;
    uint8_t *body = malloc(size + 1); /* an allocation of its own: what is read beyond it is found */
    assert(body != NULL);
    memcpy(body, data + 2, size);
    long result = tierfs_noopen_answer(noopens[data[0] % 3], NULL, &header, body, size);
    assert(result == TIERFS_NOT_NOOPEN || result == -ENOSYS || result == -EROFS);
    if (size != 0 && memcmp(body, data + 2, size) != 0) {
        static const uint64_t none;
        const uint64_t handle = TIERFS_FH_FRONT | header.nodeid;
        assert(size >= 8 && memcmp(data + 2, &none, 8) == 0 && memcmp(body, &handle, 8) == 0);
        assert(memcmp(body + 8, data + 10, size - 8) == 0);
    }
    free(body);
    return 0;
}
