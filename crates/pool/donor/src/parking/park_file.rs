//! The file that a donor parks pages in.
//!
//! It has no name: whoever holds the descriptor holds the pages, as with the arena's memfd, and
//! when the last holder is gone so is the file, whatever ended them. A page stands at the same
//! place in it as in the arena, so that nothing needs to be known to find it; the file is sparse,
//! and takes only what is parked.
//!
//! Written pages are on the disk when [`ParkFile::sync`] returns. That is not for power failures,
//! which take all that was lent anyhow. Until then the pages are in the page cache, so nothing was
//! given back; and when the kernel cannot write a page of its cache out, it says so once and then
//! forgets the page.

use crate::pages::bits::{Bits, runs, words_for};
use hecaton_memory::{PAGE_SIZE, Size, pages_to_bytes};
use rustix::fs::{Advice, CWD, FallocateFlags, Mode, OFlags, fadvise, fallocate};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Where a donor may park pages, how many, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParkConfig {
    /// The directory whose file system takes the file.
    pub dir: PathBuf,
    /// Most that it takes, in whole extents; without it, as much as the file system has.
    pub limit: Option<Size>,
    /// For how long borrowers must have given nothing of what is wanted back.
    pub patience: Duration,
}

impl ParkConfig {
    /// As much as the file system of that directory has, after three seconds.
    pub fn new(dir: impl Into<PathBuf>) -> ParkConfig {
        ParkConfig { dir: dir.into(), limit: None, patience: Duration::from_secs(3) }
    }
}

/// Why pages cannot be parked.
#[derive(Debug, thiserror::Error)]
pub enum ParkError {
    /// The directory takes no file.
    #[error(
        "cannot park memory in {}: no file can be made there; name a directory of a local file \
         system with room, which this user may write to",
        dir.display()
    )]
    Create {
        /// The directory.
        dir: PathBuf,
        /// Error of the system call.
        #[source]
        source: io::Error,
    },
    /// Huge pages cannot be given back one by one.
    #[error("memory in huge pages cannot be parked: lend base pages, or do not park")]
    HugePages,
    /// The file that was handed over cannot hold the parked pages.
    #[error("the file handed over with the parked pages is not the one that they are in")]
    Foreign,
}

pub(crate) struct ParkFile {
    file: File,
    /// Which pages take room in the file, parked or not.
    blocks: Box<[AtomicU64]>,
    block_pages: AtomicU64,
}

impl ParkFile {
    /// A file with nothing in it, for a donor of so many pages.
    pub(crate) fn create(config: &ParkConfig, pages: u64) -> Result<ParkFile, ParkError> {
        let failed = |source: Errno| {
            let (dir, source) = (config.dir.clone(), source.into());
            ParkError::Create { dir, source }
        };
        let fd = without_a_name(&config.dir).map_err(failed)?;
        const TMPFS_MAGIC: i64 = 0x0102_1994;
        if rustix::fs::fstatfs(&fd).map_err(failed)?.f_type as i64 == TMPFS_MAGIC {
            let dir = config.dir.display();
            tracing::warn!(%dir, "pages are to be parked in a file system that is memory itself");
        }
        Ok(ParkFile::of(fd, pages))
    }

    /// The file of a predecessor of this process, in which only `kept` pages are of use still.
    pub(crate) fn adopt(fd: OwnedFd, pages: u64, kept: Bits<'_>) -> Result<ParkFile, ParkError> {
        let status = rustix::fs::fstat(&fd).map_err(|_| ParkError::Foreign)?;
        let is_file = rustix::fs::FileType::from_raw_mode(status.st_mode).is_file();
        let file_pages = (status.st_size as u64 / PAGE_SIZE as u64).min(pages);
        if !is_file || kept.count(file_pages..pages) > 0 {
            return Err(ParkError::Foreign);
        }
        let file = ParkFile::of(fd, pages);
        (0..file_pages).for_each(|page| file.note(page));
        // The predecessor had written these pages, but not yet parked them, or no longer.
        for run in runs(0..file_pages, |page| !kept.get(page)) {
            file.punch(run);
        }
        Ok(file)
    }

    fn of(fd: OwnedFd, pages: u64) -> ParkFile {
        // Else a write beyond the process's file size limit ends the process, and does not fail.
        // SAFETY: ignoring a signal runs no code.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        ParkFile { file: File::from(fd), blocks: words_for(pages), block_pages: AtomicU64::new(0) }
    }

    /// Pages that take room in the file.
    pub(crate) fn pages(&self) -> u64 {
        self.block_pages.load(Ordering::Relaxed)
    }

    /// Reads pages that follow one another.
    pub(crate) fn read(&self, first: u64, pages: &mut [[u8; PAGE_SIZE]]) -> io::Result<()> {
        self.file.read_exact_at(pages.as_flattened_mut(), pages_to_bytes(first))
    }

    /// Writes pages that follow one another. They count only after [`ParkFile::sync`].
    pub(crate) fn write(&self, first: u64, pages: &[[u8; PAGE_SIZE]]) -> io::Result<()> {
        // Whatever comes of it, they may take room from here on.
        (first..first + pages.len() as u64).for_each(|page| self.note(page));
        self.file.write_all_at(pages.as_flattened(), pages_to_bytes(first))
    }

    /// Brings written pages to the disk, and drops them from the page cache.
    pub(crate) fn sync(&self, pages: Range<u64>) -> io::Result<()> {
        self.file.sync_data()?;
        let bytes = NonZeroU64::new(pages_to_bytes(pages.end - pages.start));
        // The kernel would give the cache up anyhow when memory is short, only later.
        let _ = fadvise(&self.file, pages_to_bytes(pages.start), bytes, Advice::DontNeed);
        Ok(())
    }

    /// Gives the room of pages back, if they take any. A file system without holes keeps the room,
    /// for the next page that is parked there.
    pub(crate) fn punch(&self, pages: Range<u64>) {
        let blocks = Bits(&self.blocks);
        for run in runs(pages, |page| blocks.get(page)) {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let (at, bytes) = (pages_to_bytes(run.start), pages_to_bytes(run.end - run.start));
            match fallocate(&self.file, flags, at, bytes) {
                Ok(()) => {
                    self.block_pages.fetch_sub(run.end - run.start, Ordering::Relaxed);
                    blocks.clear(run);
                }
                Err(error) => {
                    tracing::warn!(%error, bytes, "room on the disk could not be given back");
                    return;
                }
            }
        }
    }

    /// Whether the page takes room.
    pub(crate) fn has_block(&self, page: u64) -> bool {
        Bits(&self.blocks).get(page)
    }

    fn note(&self, page: u64) {
        let blocks = Bits(&self.blocks);
        if !blocks.get(page) {
            blocks.set(page);
            self.block_pages.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl AsFd for ParkFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// A file in the directory that no name leads to.
fn without_a_name(dir: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::openat(CWD, dir, flags | OFlags::TMPFILE, mode) {
        // File systems that know no such files say either, the second one those that take the path
        // for that of a file.
        Err(Errno::OPNOTSUPP | Errno::ISDIR) => {
            let path = dir.join(format!(".hecaton-park-{:016x}", hecaton_memory::random_u64()));
            let fd = rustix::fs::openat(CWD, &path, flags | OFlags::CREATE | OFlags::EXCL, mode)?;
            rustix::fs::unlinkat(CWD, &path, rustix::fs::AtFlags::empty())?;
            Ok(fd)
        }
        opened => opened,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(dir: &Path) -> ParkConfig {
        ParkConfig::new(dir)
    }

    #[test]
    fn takes_room_for_what_is_in_it_and_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = ParkFile::create(&config(dir.path()), 1000).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let pages = [[1; PAGE_SIZE], [2; PAGE_SIZE]];
        file.write(998, &pages).unwrap();
        file.write(998, &pages).unwrap();
        file.sync(998..1000).unwrap();
        assert_eq!(file.pages(), 2);
        let mut read = [[0; PAGE_SIZE]; 2];
        file.read(998, &mut read).unwrap();
        assert_eq!(read, pages);

        let kept = words_for(1000);
        Bits(&kept).set(999);
        let fd = file.as_fd().try_clone_to_owned().unwrap();
        let next = ParkFile::adopt(fd, 1000, Bits(&kept)).unwrap();
        assert_eq!(next.pages(), 1, "what is of no use is given back");
        next.read(998, &mut read).unwrap();
        assert_eq!(read, [[0; PAGE_SIZE], pages[1]]);
        next.punch(0..1000);
        assert_eq!(next.pages(), 0);
    }

    #[test]
    fn a_directory_that_takes_no_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = ParkFile::create(&config(&dir.path().join("none")), 10).err().unwrap();
        assert!(error.to_string().contains("/none: no file can be made there"), "{error}");
    }

    #[test]
    fn a_file_that_cannot_have_the_pages_is_refused() {
        let kept = words_for(10);
        Bits(&kept).set(3);
        let adopt = |file: File| ParkFile::adopt(file.into(), 10, Bits(&kept)).map(drop);
        let short = tempfile::tempfile().unwrap();
        short.set_len(4 * PAGE_SIZE as u64 - 1).unwrap();
        assert!(matches!(adopt(short), Err(ParkError::Foreign)));
        let device = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert!(matches!(adopt(device), Err(ParkError::Foreign)));
    }
}
