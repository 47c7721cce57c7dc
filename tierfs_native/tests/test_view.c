/* The view of the namespace: opening, records, damaged records, scans, snapshots beside a writer. */
#include "view.h"
#include "namespace.h"

static struct tierfs_inode an_inode(uint64_t ino, uint32_t mode)
{
    return (struct tierfs_inode){.ino = ino, .mode = mode, .nlink = 1, .size_bytes = ino * 100, .uid = 7};
}

static void make_namespace(const char *directory)
{
    struct writer writer;
    struct tierfs_inode inode = an_inode(1, S_IFDIR | 0755);

    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION);
    put_inode(&writer, &inode);
    for (uint64_t ino = 20; ino < 30; ino++) {
        char name[16];

        inode = an_inode(ino, S_IFREG | 0644);
        put_inode(&writer, &inode);
        snprintf(name, sizeof(name), "file%d", (int)ino);
        put_name_of(&writer, 1, name, ino, S_IFREG, ino);
    }
    inode = an_inode(40, S_IFLNK | 0777);
    put_inode(&writer, &inode);
    put_symlink(&writer, 40, "some/where");
    put_name_of(&writer, 2, "link", 40, S_IFLNK, 40); /* of another directory */
    writer_close(&writer);
}

static void test_opening(void)
{
    struct tierfs_view *view = NULL;
    struct writer writer;
    char directory[PATH_BYTES];

    assert(tierfs_view_open("/nonexistent/tierfs", &view) == -ENOENT);
    make_directory(directory);
    assert(tierfs_view_open(directory, &view) == -ENOENT);

    writer_open(&writer, directory); /* tables, but nothing says of which format */
    writer_close(&writer);
    assert(tierfs_view_open(directory, &view) == -ENOENT);

    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION + 1);
    writer_close(&writer);
    assert(tierfs_view_open(directory, &view) == -EPROTO);

    writer_open(&writer, directory);
    put_raw(&writer, META, "format", 6, "1234567", 7);
    writer_close(&writer);
    assert(tierfs_view_open(directory, &view) == -EPROTO);
    assert(view == NULL);
    tierfs_view_close(NULL);
    tierfs_reader_close(NULL);
    remove_directory(directory);
}

static void test_no_database(void)
{
    struct tierfs_view *view = NULL;
    char directory[PATH_BYTES];
    char path[PATH_BYTES + 16];
    FILE *file;

    make_directory(directory);
    snprintf(path, sizeof(path), "%s/data.mdb", directory);
    file = fopen(path, "w");
    assert(file != NULL);
    for (int i = 0; i < 16384; i++)
        assert(fputc(i * 7 % 251, file) != EOF);
    assert(fclose(file) == 0);
    assert(tierfs_view_open(directory, &view) < 0);
    assert(view == NULL);
    remove_directory(directory);
}

struct seen {
    uint64_t seqs[32];
    size_t count;
    size_t stop_after;
};

static int see(void *context, uint64_t seq, const char *name, size_t length, uint64_t ino, uint32_t type)
{
    struct seen *seen = context;
    char expected[16];

    snprintf(expected, sizeof(expected), "file%d", (int)ino);
    assert(length == strlen(expected) && memcmp(name, expected, length) == 0);
    assert(type == S_IFREG && seq == ino);
    seen->seqs[seen->count++] = seq;
    return seen->count == seen->stop_after ? 77 : 0;
}

static void test_records(struct tierfs_reader *reader)
{
    struct tierfs_inode inode;
    struct tierfs_dirent entry;
    uint64_t parent;
    char name[300];
    char target[32];
    size_t length;

    assert(tierfs_reader_begin(reader) == 0);
    assert(tierfs_find_inode(reader, 25, &inode) == 0);
    assert(inode.ino == 25 && inode.size_bytes == 2500 && inode.uid == 7 && S_ISREG(inode.mode));
    assert(tierfs_find_inode(reader, 99, &inode) == -ENOENT);

    assert(tierfs_find_entry(reader, 1, "file21/", 6, &entry) == 0);
    assert(entry.ino == 21 && entry.seq == 21 && entry.type == S_IFREG);
    assert(tierfs_find_entry(reader, 1, "file2", 5, &entry) == -ENOENT);
    assert(tierfs_find_entry(reader, 2, "file21", 6, &entry) == -ENOENT);
    assert(tierfs_find_entry(reader, 1, "file21\0\xff\xff\xff\xff\xff\xff\xff\xff", 15, &entry) == -ENOENT);
    assert(tierfs_find_entry(reader, 1, "", 0, &entry) == -ENOENT);
    memset(name, 'n', sizeof(name));
    assert(tierfs_find_entry(reader, 1, name, 255, &entry) == -ENOENT);
    assert(tierfs_find_entry(reader, 1, name, 256, &entry) == -ENAMETOOLONG);

    assert(tierfs_find_parent(reader, 25, &parent) == 0 && parent == 1);
    assert(tierfs_find_parent(reader, 40, &parent) == 0 && parent == 2);
    assert(tierfs_find_parent(reader, 1, &parent) == -ENOENT);
    assert(tierfs_find_parent(reader, 1000, &parent) == -ENOENT);

    assert(tierfs_find_symlink(reader, 40, target, sizeof(target), &length) == 0);
    assert(length == 10 && memcmp(target, "some/where", 10) == 0);
    assert(tierfs_find_symlink(reader, 40, target, 9, &length) == -ERANGE);
    assert(tierfs_find_symlink(reader, 25, target, sizeof(target), &length) == -ENOENT);
    tierfs_reader_end(reader);
}

static void test_scan(struct tierfs_reader *reader)
{
    struct seen all = {0};
    struct seen some = {.stop_after = 3};
    struct seen rest = {0};
    struct seen none = {0};

    assert(tierfs_reader_begin(reader) == 0);
    assert(tierfs_scan(reader, 1, 0, see, &all) == 0);
    assert(all.count == 10 && all.seqs[0] == 20 && all.seqs[9] == 29);
    assert(tierfs_scan(reader, 1, 0, see, &some) == 77);
    assert(some.count == 3);
    assert(tierfs_scan(reader, 1, some.seqs[2], see, &rest) == 0);
    assert(rest.count == 7 && rest.seqs[0] == 23);
    assert(tierfs_scan(reader, 1, 29, see, &none) == 0);
    assert(tierfs_scan(reader, 1, UINT64_MAX, see, &none) == 0);
    assert(tierfs_scan(reader, UINT64_MAX, UINT64_MAX - 1, see, &none) == 0);
    assert(tierfs_scan(reader, 0, 0, see, &none) == 0);
    assert(none.count == 0);
    tierfs_reader_end(reader);
}

/* Several readers at once, until the table is full; closing one makes room. */
static void test_reader_table(struct tierfs_view *view)
{
    struct tierfs_reader *readers[600] = {NULL};
    size_t count = 0;
    int status = 0;

    while (count < 600 && (status = tierfs_reader_open(view, &readers[count])) == 0)
        count++;
    assert(status == -EAGAIN && count > 100);
    tierfs_reader_close(readers[--count]);
    assert(tierfs_reader_open(view, &readers[count]) == 0);
    for (size_t i = 0; i <= count; i++)
        tierfs_reader_close(readers[i]);
}

/* A snapshot stays what it was while another process commits; the next one has everything that was committed. */
static void test_snapshot(struct tierfs_reader *reader, const char *directory)
{
    struct tierfs_inode inode;
    int status;
    pid_t child;

    assert(tierfs_reader_begin(reader) == 0);
    child = fork();
    assert(child >= 0);
    if (child == 0) {
        struct writer writer;

        writer_open(&writer, directory);
        for (uint64_t ino = 1000; ino < 2000; ino++) {
            inode = an_inode(ino, S_IFREG | 0600);
            put_inode(&writer, &inode);
            writer_commit(&writer);
        }
        writer_close(&writer);
        _exit(0);
    }
    assert(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    assert(tierfs_find_inode(reader, 1999, &inode) == -ENOENT);
    assert(tierfs_find_inode(reader, 25, &inode) == 0);
    tierfs_reader_end(reader);
    assert(tierfs_reader_begin(reader) == 0);
    assert(tierfs_find_inode(reader, 1999, &inode) == 0 && inode.mode == (S_IFREG | 0600));
    tierfs_reader_end(reader);
}

static int count_entry(void *context, uint64_t seq, const char *name, size_t length, uint64_t ino,
                       uint32_t type)
{
    (void)seq, (void)name, (void)length, (void)ino, (void)type;
    (*(int *)context)++;
    return 0;
}

/* What is not as it must be is told, never used. */
static void test_damage(void)
{
    struct tierfs_view *view;
    struct tierfs_reader *reader;
    struct tierfs_inode inode = an_inode(50, S_IFREG);
    struct tierfs_dirent entry = {.ino = 50, .seq = 1, .type = S_IFREG};
    struct tierfs_dirseq header = {.ino = 50, .type = S_IFREG};
    struct writer writer;
    uint64_t parent;
    uint8_t key[64], value[sizeof(header) + 300];
    char directory[PATH_BYTES], target[5000];
    size_t length;
    int count = 0;

    make_directory(directory);
    writer_open(&writer, directory);
    put_format(&writer, TIERFS_FORMAT_VERSION);
    put_raw(&writer, INODE, key, inode_key(key, 50), &inode, sizeof(inode) - 1);
    put_raw(&writer, INODE, key, inode_key(key, 51), &inode, sizeof(inode)); /* of another number */
    inode = an_inode(52, 0); /* no type */
    put_inode(&writer, &inode);
    inode = an_inode(53, S_IFREG);
    inode.size_bytes = UINT64_C(1) << 63;
    put_inode(&writer, &inode);
    put_raw(&writer, INODE, key, inode_key(key, 54), "", 0);
    put_raw(&writer, DIRENT, key, dirent_key(key, 60, "long", 4), value, sizeof(entry) + 1);
    put_raw(&writer, DIRENT, key, dirent_key(key, 60, "short", 5), &entry, sizeof(entry) - 1);
    entry.type = 0;
    put_raw(&writer, DIRENT, key, dirent_key(key, 60, "typeless", 8), &entry, sizeof(entry));
    put_raw(&writer, DIRSEQ, key, dirseq_key(key, 61, 1), &header, sizeof(header)); /* no name */
    memcpy(value, &header, sizeof(header));
    memset(value + sizeof(header), 'n', sizeof(value) - sizeof(header));
    put_raw(&writer, DIRSEQ, key, dirseq_key(key, 62, 1), value, sizeof(value)); /* too long a name */
    value[sizeof(header) + 2] = '/';
    put_raw(&writer, DIRSEQ, key, dirseq_key(key, 63, 1), value, sizeof(header) + 10);
    value[sizeof(header) + 2] = 0;
    put_raw(&writer, DIRSEQ, key, dirseq_key(key, 64, 1), value, sizeof(header) + 10);
    put_raw(&writer, DIRSEQ, key, dirseq_key(key, 65, UINT64_C(1) << 56) - 1, value, sizeof(header) + 1);
    put_raw(&writer, PARENT, key, dirseq_key(key, 66, 1), "", 0); /* a name of no bytes */
    tierfs_encode_key(key, 67);
    memset(target, 't', sizeof(target));
    put_raw(&writer, SYMLINK, key, 8, target, sizeof(target));
    tierfs_encode_key(key, 68);
    put_raw(&writer, SYMLINK, key, 8, "to\0o", 4);
    writer_close(&writer);

    assert(tierfs_view_open(directory, &view) == 0);
    assert(tierfs_reader_open(view, &reader) == 0);
    assert(tierfs_reader_begin(reader) == 0);
    for (uint64_t ino = 50; ino < 55; ino++)
        assert(tierfs_find_inode(reader, ino, &inode) == -EUCLEAN);
    assert(tierfs_find_entry(reader, 60, "long", 4, &entry) == -EUCLEAN);
    assert(tierfs_find_entry(reader, 60, "short", 5, &entry) == -EUCLEAN);
    assert(tierfs_find_entry(reader, 60, "typeless", 8, &entry) == -EUCLEAN);
    for (uint64_t ino = 61; ino < 66; ino++)
        assert(tierfs_scan(reader, ino, 0, count_entry, &count) == -EUCLEAN);
    assert(count == 0);
    assert(tierfs_find_parent(reader, 66, &parent) == -EUCLEAN);
    assert(tierfs_find_symlink(reader, 67, target, sizeof(target), &length) == -EUCLEAN);
    assert(tierfs_find_symlink(reader, 68, target, sizeof(target), &length) == -EUCLEAN);
    tierfs_reader_end(reader);
    tierfs_reader_close(reader);
    tierfs_view_close(view);
    remove_directory(directory);
}

int main(void)
{
    struct tierfs_view *view;
    struct tierfs_reader *reader;
    char directory[PATH_BYTES];

    test_opening();
    test_no_database();
    make_directory(directory);
    make_namespace(directory);
    assert(tierfs_view_open(directory, &view) == 0);
    assert(tierfs_reader_open(view, &reader) == 0);
    test_records(reader);
    test_scan(reader);
    test_reader_table(view);
    test_snapshot(reader, directory);
    test_records(reader);
    tierfs_reader_close(reader);
    tierfs_view_close(view);
    remove_directory(directory);
    test_damage();
    puts("view: ok");
    return 0;
}
