#include "view.h"

#include <lmdb.h>
#include <stdlib.h>

/* As the engine sets it; counts for whoever opens the lock file first. */
#define MAX_READERS 512
#define MAX_TABLES 16

#define KEY_BYTES 8
#define EPOCH_BYTES 8

/* epoch_desc of what is alive; what snapshots see besides is in tables that only the engine reads. */
static const uint8_t epoch_0[EPOCH_BYTES] = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};

struct tierfs_view {
    MDB_env *env;
    MDB_dbi dirent, dirseq, inode, parent, symlink;
};

struct tierfs_reader {
    const struct tierfs_view *view;
    MDB_txn *txn;
    MDB_cursor *dirseq, *parent; /* kept and renewed: opening one allocates */
};

/* 0 or -errno for what an LMDB function returned. */
static int to_errno(int code)
{
    if (code == 0)
        return 0;
    if (code > 0)
        return -code;
    switch (code) {
    case MDB_NOTFOUND:
        return -ENOENT;
    case MDB_VERSION_MISMATCH:
    case MDB_INVALID:
        return -EPROTO;
    case MDB_READERS_FULL:
        return -EAGAIN;
    default:
        return -EIO;
    }
}

/* -- opening ----------------------------------------------------------------------------------------------- */

static int check_format(MDB_txn *txn, MDB_dbi meta)
{
    char name[] = "format";
    MDB_val key = {sizeof(name) - 1, name};
    MDB_val value;
    uint64_t format;
    int status = to_errno(mdb_get(txn, meta, &key, &value));

    if (status != 0)
        return status;
    if (value.mv_size != KEY_BYTES)
        return -EPROTO;
    format = tierfs_decode_key(value.mv_data);
    return format >= TIERFS_OLDEST_FORMAT_VERSION && format <= TIERFS_FORMAT_VERSION ? 0 : -EPROTO;
}

static int open_tables(struct tierfs_view *view, MDB_txn *txn)
{
    MDB_dbi meta;
    const struct {
        const char *name;
        MDB_dbi *table;
    } tables[] = {
        {"meta", &meta},         {"dirent", &view->dirent}, {"dirseq", &view->dirseq},
        {"inode", &view->inode}, {"parent", &view->parent}, {"symlink", &view->symlink},
    };

    for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
        int status = to_errno(mdb_dbi_open(txn, tables[i].name, 0, tables[i].table));

        if (status != 0)
            return status;
    }
    return check_format(txn, meta);
}

int tierfs_view_open(const char *lmdb_dir, struct tierfs_view **result)
{
    MDB_txn *txn = NULL;
    int status;
    struct tierfs_view *view = calloc(1, sizeof(*view));

    if (view == NULL)
        return -ENOMEM;
    status = to_errno(mdb_env_create(&view->env));
    if (status != 0)
        goto failed;
    status = to_errno(mdb_env_set_maxdbs(view->env, MAX_TABLES));
    if (status == 0)
        status = to_errno(mdb_env_set_maxreaders(view->env, MAX_READERS));
    /*
     * The map is as large as the engine's: its size is in the file. NOTLS: a slot of the reader table belongs to a
     * reader, not to a thread.
     */
    if (status == 0)
        status = to_errno(mdb_env_open(view->env, lmdb_dir, MDB_RDONLY | MDB_NOTLS | MDB_NORDAHEAD, 0));
    if (status == 0) {
        int dead;
        /* The slots of readers that were killed. */
        status = to_errno(mdb_reader_check(view->env, &dead));
    }
    if (status == 0)
        status = to_errno(mdb_txn_begin(view->env, NULL, MDB_RDONLY, &txn));
    if (status != 0)
        goto failed;
    status = open_tables(view, txn);
    if (status != 0) {
        mdb_txn_abort(txn);
        goto failed;
    }
    /* A table that was opened in a transaction that is aborted is closed again. */
    status = to_errno(mdb_txn_commit(txn));
    if (status != 0)
        goto failed;
    *result = view;
    return 0;

failed:
    tierfs_view_close(view);
    return status;
}

void tierfs_view_close(struct tierfs_view *view)
{
    if (view == NULL)
        return;
    if (view->env != NULL)
        mdb_env_close(view->env);
    free(view);
}

int tierfs_reader_open(struct tierfs_view *view, struct tierfs_reader **result)
{
    int status;
    struct tierfs_reader *reader = calloc(1, sizeof(*reader));

    if (reader == NULL)
        return -ENOMEM;
    reader->view = view;
    status = to_errno(mdb_txn_begin(view->env, NULL, MDB_RDONLY, &reader->txn));
    if (status == 0)
        status = to_errno(mdb_cursor_open(reader->txn, view->dirseq, &reader->dirseq));
    if (status == 0)
        status = to_errno(mdb_cursor_open(reader->txn, view->parent, &reader->parent));
    if (status != 0) {
        tierfs_reader_close(reader);
        return status;
    }
    mdb_txn_reset(reader->txn);
    *result = reader;
    return 0;
}

void tierfs_reader_close(struct tierfs_reader *reader)
{
    if (reader == NULL)
        return;
    if (reader->parent != NULL)
        mdb_cursor_close(reader->parent);
    if (reader->dirseq != NULL)
        mdb_cursor_close(reader->dirseq);
    if (reader->txn != NULL)
        mdb_txn_abort(reader->txn);
    free(reader);
}

int tierfs_reader_begin(struct tierfs_reader *reader)
{
    return to_errno(mdb_txn_renew(reader->txn));
}

void tierfs_reader_end(struct tierfs_reader *reader)
{
    mdb_txn_reset(reader->txn);
}

uint64_t tierfs_reader_snapshot(const struct tierfs_reader *reader)
{
    return mdb_txn_id(reader->txn);
}

/* -- single records ------------------------------------------------------------------------------------------ */

int tierfs_find_inode(struct tierfs_reader *reader, uint64_t ino, struct tierfs_inode *inode)
{
    uint8_t bytes[KEY_BYTES + EPOCH_BYTES];
    MDB_val key = {sizeof(bytes), bytes};
    MDB_val value;
    int status;

    tierfs_encode_key(bytes, ino);
    memcpy(bytes + KEY_BYTES, epoch_0, EPOCH_BYTES);
    status = to_errno(mdb_get(reader->txn, reader->view->inode, &key, &value));
    return status != 0 ? status : tierfs_decode_inode(value.mv_data, value.mv_size, ino, inode);
}

int tierfs_find_entry(struct tierfs_reader *reader, uint64_t parent, const char *name, size_t length,
                      struct tierfs_dirent *entry)
{
    uint8_t bytes[KEY_BYTES + TIERFS_NAME_MAX + 1 + EPOCH_BYTES];
    MDB_val key = {KEY_BYTES + length + 1 + EPOCH_BYTES, bytes};
    MDB_val value;
    int status;

    if (length > TIERFS_NAME_MAX)
        return -ENAMETOOLONG;
    tierfs_encode_key(bytes, parent);
    memcpy(bytes + KEY_BYTES, name, length);
    bytes[KEY_BYTES + length] = 0;
    memcpy(bytes + KEY_BYTES + length + 1, epoch_0, EPOCH_BYTES);
    status = to_errno(mdb_get(reader->txn, reader->view->dirent, &key, &value));
    return status != 0 ? status : tierfs_decode_dirent(value.mv_data, value.mv_size, entry);
}

int tierfs_find_parent(struct tierfs_reader *reader, uint64_t ino, uint64_t *parent)
{
    uint8_t bytes[KEY_BYTES];
    MDB_val key = {sizeof(bytes), bytes};
    MDB_val value;
    int status = to_errno(mdb_cursor_renew(reader->txn, reader->parent));

    if (status != 0)
        return status;
    tierfs_encode_key(bytes, ino);
    status = to_errno(mdb_cursor_get(reader->parent, &key, &value, MDB_SET_RANGE));
    if (status != 0)
        return status;
    if (key.mv_size < KEY_BYTES || tierfs_decode_key(key.mv_data) != ino)
        return -ENOENT;
    if (key.mv_size <= 2 * (size_t)KEY_BYTES)
        return -EUCLEAN;
    *parent = tierfs_decode_key((const uint8_t *)key.mv_data + KEY_BYTES);
    return 0;
}

int tierfs_find_symlink(struct tierfs_reader *reader, uint64_t ino, char *target, size_t capacity,
                        size_t *length)
{
    uint8_t bytes[KEY_BYTES];
    MDB_val key = {sizeof(bytes), bytes};
    MDB_val value;
    int status;

    tierfs_encode_key(bytes, ino);
    status = to_errno(mdb_get(reader->txn, reader->view->symlink, &key, &value));
    if (status != 0)
        return status;
    if (value.mv_size > TIERFS_SYMLINK_MAX || memchr(value.mv_data, '\0', value.mv_size) != NULL)
        return -EUCLEAN;
    if (value.mv_size > capacity)
        return -ERANGE;
    memcpy(target, value.mv_data, value.mv_size);
    *length = value.mv_size;
    return 0;
}

/* -- directories --------------------------------------------------------------------------------------------- */

int tierfs_scan(struct tierfs_reader *reader, uint64_t parent, uint64_t after_seq, tierfs_scan_fn *fn,
                void *context)
{
    uint8_t bytes[2 * KEY_BYTES];
    MDB_val key = {sizeof(bytes), bytes};
    MDB_val value;
    int status;

    if (after_seq == UINT64_MAX)
        return 0;
    status = to_errno(mdb_cursor_renew(reader->txn, reader->dirseq));
    if (status != 0)
        return status;
    tierfs_encode_key(bytes, parent);
    tierfs_encode_key(bytes + KEY_BYTES, after_seq + 1);
    status = to_errno(mdb_cursor_get(reader->dirseq, &key, &value, MDB_SET_RANGE));
    while (status == 0) {
        struct tierfs_dirseq record;
        const char *name;
        size_t length;

        if (key.mv_size != sizeof(bytes))
            return -EUCLEAN;
        if (tierfs_decode_key(key.mv_data) != parent)
            return 0;
        status = tierfs_decode_dirseq(value.mv_data, value.mv_size, &record, &name, &length);
        if (status != 0)
            return status;
        status = fn(context, tierfs_decode_key((const uint8_t *)key.mv_data + KEY_BYTES), name, length,
                    record.ino, record.type);
        if (status != 0)
            return status;
        status = to_errno(mdb_cursor_get(reader->dirseq, &key, &value, MDB_NEXT));
    }
    return status == -ENOENT ? 0 : status;
}
