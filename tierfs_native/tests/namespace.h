/*
 * Makes namespaces for tests, record by record, also wrong ones. The writer is closed before a view is opened, or
 * lives in another process: LMDB must not be open twice in one.
 */
#pragma once

#include "records.h"

#include <assert.h>
#include <errno.h>
#include <lmdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum table {
    META,
    DIRENT,
    DIRSEQ,
    INODE,
    PARENT,
    SYMLINK,
    TABLES
};

static const char *const table_names[TABLES] = {"meta", "dirent", "dirseq", "inode", "parent", "symlink"};

struct writer {
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi tables[TABLES];
};

#define PATH_BYTES 512

/* A directory of its own for the database. Whoever runs tests that may fail says in TMPDIR where. */
static inline void make_directory(char path[PATH_BYTES])
{
    const char *base = getenv("TMPDIR");

    snprintf(path, PATH_BYTES, "%s/tierfs-XXXXXX", base != NULL ? base : "/tmp");
    assert(mkdtemp(path) != NULL);
}

static inline void remove_directory(const char *path)
{
    static const char *const names[] = {"data.mdb", "lock.mdb"};
    char file[PATH_BYTES + 16];

    for (size_t i = 0; i < 2; i++) {
        snprintf(file, sizeof(file), "%s/%s", path, names[i]);
        unlink(file);
    }
    rmdir(path);
}

/* Packets between a fuzzer and the process that writes for it; the timer of libFuzzer interrupts. */
static inline ssize_t packet_receive(int socket, void *data, size_t bytes)
{
    ssize_t got;

    do
        got = recv(socket, data, bytes, 0);
    while (got < 0 && errno == EINTR);
    return got;
}

static inline ssize_t packet_send(int socket, const void *data, size_t bytes)
{
    ssize_t sent;

    do
        sent = send(socket, data, bytes, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent;
}

static inline void put_raw(struct writer *writer, enum table table, const void *key, size_t key_bytes,
                           const void *value, size_t value_bytes)
{
    MDB_val k = {key_bytes, (void *)(uintptr_t)key};
    MDB_val v = {value_bytes, (void *)(uintptr_t)value};

    assert(mdb_put(writer->txn, writer->tables[table], &k, &v, 0) == 0);
}

/* Begins a transaction; tables are made and may be empty. */
static inline void writer_open(struct writer *writer, const char *directory)
{
    assert(mdb_env_create(&writer->env) == 0);
    assert(mdb_env_set_maxdbs(writer->env, 16) == 0);
    assert(mdb_env_set_mapsize(writer->env, 256 << 20) == 0);
    assert(mdb_env_set_maxreaders(writer->env, 512) == 0);
    assert(mdb_env_open(writer->env, directory, MDB_NOSYNC, 0600) == 0);
    assert(mdb_txn_begin(writer->env, NULL, 0, &writer->txn) == 0);
    for (size_t i = 0; i < TABLES; i++)
        assert(mdb_dbi_open(writer->txn, table_names[i], MDB_CREATE, &writer->tables[i]) == 0);
}

static inline void put_format(struct writer *writer, uint64_t version)
{
    uint8_t value[8];

    tierfs_encode_key(value, version);
    put_raw(writer, META, "format", 6, value, sizeof(value));
}

static inline void writer_commit(struct writer *writer)
{
    assert(mdb_txn_commit(writer->txn) == 0);
    assert(mdb_txn_begin(writer->env, NULL, 0, &writer->txn) == 0);
}

static inline void writer_close(struct writer *writer)
{
    assert(mdb_txn_commit(writer->txn) == 0);
    mdb_env_close(writer->env);
}

static inline size_t inode_key(uint8_t key[16], uint64_t ino)
{
    tierfs_encode_key(key, ino);
    memset(key + 8, 0xff, 8);
    return 16;
}

static inline size_t dirent_key(uint8_t *key, uint64_t parent, const char *name, size_t length)
{
    tierfs_encode_key(key, parent);
    memcpy(key + 8, name, length);
    key[8 + length] = 0;
    memset(key + 9 + length, 0xff, 8);
    return 8 + length + 9;
}

static inline size_t dirseq_key(uint8_t key[16], uint64_t parent, uint64_t seq)
{
    tierfs_encode_key(key, parent);
    tierfs_encode_key(key + 8, seq);
    return 16;
}

static inline void put_inode(struct writer *writer, const struct tierfs_inode *inode)
{
    uint8_t key[16];

    put_raw(writer, INODE, key, inode_key(key, inode->ino), inode, sizeof(*inode));
}

/* A name of ino, of which the cookie is seq. */
static inline void put_name_of(struct writer *writer, uint64_t parent, const char *name, uint64_t ino,
                               uint32_t type, uint64_t seq)
{
    const size_t length = strlen(name);
    const struct tierfs_dirent entry = {.ino = ino, .seq = seq, .type = type};
    const struct tierfs_dirseq header = {.ino = ino, .type = type};
    uint8_t key[8 + TIERFS_NAME_MAX + 9];
    uint8_t value[sizeof(header) + TIERFS_NAME_MAX];

    put_raw(writer, DIRENT, key, dirent_key(key, parent, name, length), &entry, sizeof(entry));
    memcpy(value, &header, sizeof(header));
    memcpy(value + sizeof(header), name, length);
    put_raw(writer, DIRSEQ, key, dirseq_key(key, parent, seq), value, sizeof(header) + length);
    tierfs_encode_key(key, ino);
    tierfs_encode_key(key + 8, parent);
    memcpy(key + 16, name, length);
    put_raw(writer, PARENT, key, 16 + length, "", 0);
}

static inline void put_symlink(struct writer *writer, uint64_t ino, const char *target)
{
    uint8_t key[8];

    tierfs_encode_key(key, ino);
    put_raw(writer, SYMLINK, key, sizeof(key), target, strlen(target));
}
