/*
 * A read-only view of namespace.lmdb, which the engine, another process, writes at the same time.
 *
 * One view per process, shared by its threads; one reader per thread (not tied to it: whoever uses a reader has it
 * alone). LMDB must not be opened twice in one process: the second open damages the reader table of the first. So
 * a process that has this view must not open the namespace by other means, nor may two views be open in it; and a
 * child made by fork() must not use its parent's (the table has a process id in each slot).
 *
 * Between begin and end a reader sees one snapshot: the newest commit at the time of begin. A snapshot keeps every
 * page that is freed afterwards from being used again, so it is held for microseconds only.
 *
 * Functions return 0 or -errno. Of a single record: -ENOENT if there is none, -EUCLEAN if it is damaged. What LMDB
 * itself reports becomes -EIO, or the errno that it has, also when the engine has let the database grow beyond the
 * map with which this process opened it (that needs a new process).
 */
#pragma once

#include "records.h"

#include <stddef.h>
#include <stdint.h>

struct tierfs_view;
struct tierfs_reader;

/*
 * lmdb_dir: the directory namespace.lmdb. -ENOENT: it is not there, or the engine has not made its tables yet.
 * -EPROTO: it has another format. -ENOMEM: no address space of its size.
 */
int tierfs_view_open(const char *lmdb_dir, struct tierfs_view **view);

/* After the last reader. */
void tierfs_view_close(struct tierfs_view *view);

/* -EAGAIN: the reader table of the database is full. */
int tierfs_reader_open(struct tierfs_view *view, struct tierfs_reader **reader);
void tierfs_reader_close(struct tierfs_reader *reader);

/* Not nested. Every begin that returned 0 needs its end. */
int tierfs_reader_begin(struct tierfs_reader *reader);
void tierfs_reader_end(struct tierfs_reader *reader);

/* -- between begin and end ------------------------------------------------------------------------------------ */

/* A number that is the same for the same snapshot; every commit makes another one. */
uint64_t tierfs_reader_snapshot(const struct tierfs_reader *reader);

int tierfs_find_inode(struct tierfs_reader *reader, uint64_t ino, struct tierfs_inode *inode);

/* -ENAMETOOLONG: of more than 255 bytes. The name need not end in a NUL. */
int tierfs_find_entry(struct tierfs_reader *reader, uint64_t parent, const char *name, size_t length,
                      struct tierfs_dirent *entry);

/* The directory in which ino has its first name. -ENOENT: it has none (the root, what has been removed). */
int tierfs_find_parent(struct tierfs_reader *reader, uint64_t ino, uint64_t *parent);

/* -ENOENT: it has no target, so it is no symbolic link. -ERANGE: longer than capacity. No NUL is added. */
int tierfs_find_symlink(struct tierfs_reader *reader, uint64_t ino, char *target, size_t capacity,
                        size_t *length);

/*
 * Calls fn for every entry of parent whose cookie is above after_seq, in the order of cookies, until it returns
 * something else than 0, which is then returned. name is valid during the call and ends without a NUL; its bytes
 * have been checked (tierfs_is_name). fn may use the reader, but not scan.
 */
typedef int tierfs_scan_fn(void *context, uint64_t seq, const char *name, size_t length, uint64_t ino,
                           uint32_t type);
int tierfs_scan(struct tierfs_reader *reader, uint64_t parent, uint64_t after_seq, tierfs_scan_fn *fn,
                void *context);
