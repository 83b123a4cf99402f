//! The file on a disk that holds segments for which the pool has no room.
//!
//! A page has the same place as in the volume, so nothing must be looked up or can be lost. The
//! file is sparse. Its contents are of use only with the volume's tables, which have the pages'
//! sums. So a read finds data that the disk gives back wrongly, or not at all. Pages of an
//! encrypted volume are sealed, as they are at donors ([`crate::pool::sealing`]).

use hecaton_memory::{PAGE_SIZE, PageNo, pages_to_bytes};
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Release};

/// A volume's spill file.
#[derive(Debug)]
pub struct Spill {
    file: File,
    path: PathBuf,
    /// Something was written since the last flush.
    is_dirty: AtomicBool,
    /// Held by who flushes: what one flush takes upon itself no other may answer for before.
    flushing: Mutex<()>,
}

/// Why the spill file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SpillError {
    /// A file is there already.
    #[error("the spill file {0} is there already: remove it if no volume uses it, or name another")]
    Exists(PathBuf),
    /// The disk refuses.
    #[error("cannot {what} the spill file {path}")]
    Failed {
        /// Action that failed.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

impl SpillError {
    /// Whether the disk is full, and nothing else is wrong with it.
    pub fn is_full(&self) -> bool {
        use io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
        let SpillError::Failed { source, .. } = self else { return false };
        matches!(source.kind(), StorageFull | QuotaExceeded | FileTooLarge)
    }
}

impl Spill {
    /// A new file, which only this user and root may read. One that is there is somebody's.
    pub fn create(path: &Path) -> Result<Spill, SpillError> {
        let opened =
            OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AlreadyExists => SpillError::Exists(path.to_owned()),
            _ => SpillError::Failed { what: "create", path: path.to_owned(), source },
        };
        Ok(Spill::of(opened.map_err(failed)?, path))
    }

    /// The file that a predecessor has created at `path`.
    pub fn from_fd(fd: OwnedFd, path: &Path) -> Spill {
        Spill::of(fd.into(), path)
    }

    fn of(file: File, path: &Path) -> Spill {
        // A predecessor may have written without a flush.
        Spill {
            file,
            path: path.to_owned(),
            is_dirty: AtomicBool::new(true),
            flushing: Mutex::default(),
        }
    }

    pub(crate) fn read(&self, page: PageNo, contents: &mut [u8]) -> Result<(), SpillError> {
        let read = self.file.read_exact_at(contents, pages_to_bytes(page));
        read.map_err(|source| self.failed("read", source))
    }

    pub(crate) fn write(&self, page: PageNo, contents: &[u8]) -> Result<(), SpillError> {
        debug_assert_eq!(contents.len(), PAGE_SIZE);
        self.is_dirty.store(true, Release);
        let written = self.file.write_all_at(contents, pages_to_bytes(page));
        written.map_err(|source| self.failed("write", source))
    }

    /// Gives the disk the room of pages back that no request will read. If that fails, their room
    /// stays taken until they are written again.
    pub(crate) fn discard(&self, pages: &Range<PageNo>) {
        let (from, bytes) = (pages_to_bytes(pages.start), pages_to_bytes(pages.end - pages.start));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = fallocate(&self.file, flags, from, bytes) {
            tracing::debug!(path = %self.path.display(), %error, "no hole can be made");
        }
    }

    /// Whether something was written since the last flush.
    #[cfg(test)]
    pub(crate) fn is_dirty(&self) -> bool {
        self.is_dirty.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Returns when the disk has what was written before. The kernel tells only here of what it
    /// could not write.
    pub(crate) fn flush(&self) -> Result<(), SpillError> {
        let _turn = self.flushing.lock().expect("no thread panics as it flushes");
        if !self.is_dirty.swap(false, AcqRel) {
            return Ok(());
        }
        self.file.sync_data().map_err(|source| {
            self.is_dirty.store(true, Release);
            self.failed("flush", source)
        })
    }

    /// Removes the file, if it is still the one at its path.
    pub fn remove(&self) {
        let of = |file: &std::fs::Metadata| (file.dev(), file.ino());
        let own = self.file.metadata().map(|file| of(&file)).ok();
        let there = std::fs::symlink_metadata(&self.path).map(|file| of(&file)).ok();
        if own.is_some()
            && own == there
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "a spill file is left");
        }
    }

    fn failed(&self, what: &'static str, source: io::Error) -> SpillError {
        SpillError::Failed { what, path: self.path.clone(), source }
    }
}

impl AsFd for Spill {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_where_they_were_put_and_the_file_goes_with_the_volume() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("spill");
        let spill = Spill::create(&path).unwrap();
        assert!(Spill::create(&path).unwrap_err().to_string().contains("spill"));
        spill.write(7, &[3; PAGE_SIZE]).unwrap();
        let kept = Spill::from_fd(spill.as_fd().try_clone_to_owned().unwrap(), &path);
        drop(spill);
        let mut contents = [0; PAGE_SIZE];
        kept.read(7, &mut contents).unwrap();
        assert_eq!(contents, [3; PAGE_SIZE]);
        kept.discard(&(7..8));
        kept.read(7, &mut contents).unwrap();
        assert_eq!(contents, [0; PAGE_SIZE]);
        assert!(!kept.read(8, &mut contents).unwrap_err().is_full(), "beyond its end");
        kept.flush().unwrap();
        // Somebody else's is not removed.
        std::fs::rename(&path, dir.path().join("other")).unwrap();
        std::fs::write(&path, "").unwrap();
        kept.remove();
        assert!(path.exists());
        std::fs::rename(dir.path().join("other"), &path).unwrap();
        kept.remove();
        assert!(!path.exists());
    }
}
