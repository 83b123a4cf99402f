//! A memory file (a memfd, or a file on tmpfs) whose pages a hypervisor maps shared.
//!
//! It is never mapped here: a read through a mapping would fill holes with new pages of zeros, and
//! behind such a page the guest would find zeros where the pool has data. `pread` on tmpfs reads a
//! hole as zeros and leaves it a hole; `SEEK_DATA` tells what is there, swapped-out pages included.

use hecaton_memory::PAGE_SIZE;
use rustix::fs::{FallocateFlags, SealFlags, SeekFrom};
use std::io;
use std::ops::Range;
use std::os::fd::{BorrowedFd, RawFd};

/// A borrowed descriptor: it belongs to the region that names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MemoryFile(pub(crate) RawFd);

/// Identity of a file: equal for two descriptors of one file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

/// Properties of a file that are checked before it is paged.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Facts {
    pub(crate) identity: Identity,
    pub(crate) bytes: u64,
    pub(crate) kind: Kind,
    /// Sealed against writing, and so against punching.
    pub(crate) sealed: bool,
}

/// Where a file's pages are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// In memory, 4 KiB each.
    Memory,
    /// In memory, in pages of that many bytes.
    HugePages(u64),
    /// On a disk, or it is no file at all.
    Other,
}

const TMPFS_MAGIC: i64 = 0x0102_1994;
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

impl MemoryFile {
    fn fd(self) -> BorrowedFd<'static> {
        // SAFETY: a region keeps its file open, and files are closed only while no batch and no
        // region names them (see `Core::close_files`).
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }

    pub(crate) fn facts(self) -> io::Result<Facts> {
        let stat = rustix::fs::fstat(self.fd())?;
        let system = rustix::fs::fstatfs(self.fd())?;
        let kind = match system.f_type as i64 {
            TMPFS_MAGIC => Kind::Memory,
            HUGETLBFS_MAGIC => Kind::HugePages(system.f_bsize as u64),
            _ => Kind::Other,
        };
        // Files that cannot be sealed answer EINVAL.
        let seals = rustix::fs::fcntl_get_seals(self.fd()).unwrap_or(SealFlags::empty());
        Ok(Facts {
            identity: Identity { device: stat.st_dev, inode: stat.st_ino },
            bytes: stat.st_size as u64,
            kind,
            sealed: seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE),
        })
    }

    /// Bytes of memory that the file takes.
    pub(crate) fn allocated_bytes(self) -> u64 {
        rustix::fs::fstat(self.fd()).map_or(0, |stat| stat.st_blocks as u64 * 512)
    }

    /// The first byte at or after `offset` that is not in a hole; `None` when only holes follow.
    fn next_data(self, offset: u64) -> io::Result<Option<u64>> {
        match rustix::fs::seek(self.fd(), SeekFrom::Data(offset)) {
            Ok(at) => Ok(Some(at)),
            Err(rustix::io::Errno::NXIO) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The parts of `range` that are there.
    pub(crate) fn data_in(self, range: Range<u64>) -> io::Result<Vec<Range<u64>>> {
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let Some(start) = self.next_data(at)?.filter(|&start| start < range.end) else { break };
            let end = rustix::fs::seek(self.fd(), SeekFrom::Hole(start))?.min(range.end);
            found.push(start..end);
            at = end;
        }
        Ok(found)
    }

    /// Reads pages from `offset` on into `to`, a page each. True if all were read; holes are zeros.
    ///
    /// # Safety
    /// `to` must be memory that nobody else uses meanwhile.
    pub(crate) unsafe fn read(self, offset: u64, to: &[libc::iovec]) -> bool {
        // SAFETY: the caller vouches for `to`.
        let read =
            unsafe { libc::preadv(self.0, to.as_ptr(), to.len() as i32, offset as libc::off_t) };
        read == (to.len() * PAGE_SIZE) as isize
    }

    /// Gives the pages of `range` back to the host, whoever maps them. False when some are there
    /// still: the kernel zeroes, but keeps, what it cannot split off a huge page.
    pub(crate) fn punch(self, range: Range<u64>) -> io::Result<bool> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(self.fd(), flags, range.start, range.end - range.start)?;
        Ok(self.next_data(range.start)?.is_none_or(|at| at >= range.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::os::fd::AsRawFd;

    const PAGE: u64 = PAGE_SIZE as u64;

    #[test]
    fn reading_a_hole_leaves_it_one() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 16 * PAGE).unwrap();
        let file = MemoryFile(fd.as_raw_fd());
        rustix::io::pwrite(&fd, &[7u8; 2 * PAGE_SIZE], 3 * PAGE).unwrap();
        let data = |from: u64| -> Vec<(u64, u64)> {
            let found = file.data_in(from * PAGE..16 * PAGE).unwrap().into_iter();
            found.map(|part| (part.start / PAGE, part.end / PAGE)).collect()
        };
        assert_eq!(data(0), [(3, 5)]);
        assert_eq!(data(4), [(4, 5)]);
        assert_eq!(data(5), []);

        let mut read = vec![[1u8; PAGE_SIZE]; 2];
        let to: Vec<_> = read
            .iter_mut()
            .map(|page| libc::iovec { iov_base: page.as_mut_ptr().cast(), iov_len: PAGE_SIZE })
            .collect();
        // SAFETY: `read` is this test's.
        assert!(unsafe { file.read(2 * PAGE, &to) });
        assert_eq!((read[0], read[1]), ([0; PAGE_SIZE], [7; PAGE_SIZE]));
        assert_eq!(file.allocated_bytes(), 2 * PAGE);

        assert!(file.punch(3 * PAGE..4 * PAGE).unwrap());
        assert_eq!(data(0), [(4, 5)]);
        assert_eq!(file.allocated_bytes(), PAGE);
        // SAFETY: as above.
        assert!(!unsafe { file.read(15 * PAGE, &to) }, "there is one page only");
    }

    #[test]
    fn files_are_told_apart() {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, PAGE).unwrap();
        let facts = MemoryFile(fd.as_raw_fd()).facts().unwrap();
        assert_eq!((facts.kind, facts.bytes, facts.sealed), (Kind::Memory, PAGE, false));
        rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).unwrap();
        assert!(MemoryFile(fd.as_raw_fd()).facts().unwrap().sealed);

        let disk = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(MemoryFile(disk.as_raw_fd()).facts().unwrap().kind, Kind::Other);
        let huge = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB);
        if let Ok(huge) = huge {
            let facts = MemoryFile(huge.as_raw_fd()).facts().unwrap();
            assert!(matches!(facts.kind, Kind::HugePages(bytes) if bytes > PAGE), "{facts:?}");
            assert_ne!(facts.identity, MemoryFile(fd.as_raw_fd()).facts().unwrap().identity);
        }
    }
}
