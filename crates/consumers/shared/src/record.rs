//! Lists the files that programs may have open, in memory that outlives the keeper.
//!
//! The entries are the kernel's file handles. A handle opens a file for as long as anybody uses it,
//! and keeps nothing alive: the file of a mapping goes, with its pages, when the last process that
//! maps it ends. A handle is appended before the program gets its file, so a keeper that is started
//! in the place of a killed one finds all files.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

/// Bytes of an entry.
const ENTRY: usize = 12;

/// Entries from which on the record is written anew, if most of them are of files that are gone.
const COMPACT_FROM: usize = 4096;

/// The kernel's handle of a file: kind, inode number, generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Handle {
    inode: u32,
    generation: u32,
    kind: i32,
}

/// `struct file_handle` of the kernel, with room for the handles of ext4.
#[repr(C)]
struct Raw {
    bytes: u32,
    kind: i32,
    inode: u32,
    generation: u32,
}

const INODE_BYTES: u32 = 8;

impl Handle {
    /// The handle of an open file.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if the file system has none of this form.
    pub fn of(file: impl AsFd) -> Result<Handle, Errno> {
        let mut raw = Raw { bytes: INODE_BYTES, kind: 0, inode: 0, generation: 0 };
        let mut mount = 0;
        // SAFETY: the kernel writes at most `bytes` bytes behind `kind`, for which there is room.
        let done = unsafe {
            let fd = file.as_fd().as_raw_fd();
            let handle = (&raw mut raw).cast::<libc::file_handle>();
            libc::name_to_handle_at(fd, c"".as_ptr(), handle, &mut mount, libc::AT_EMPTY_PATH)
        };
        match done {
            0 if raw.bytes == INODE_BYTES => {
                Ok(Handle { kind: raw.kind, inode: raw.inode, generation: raw.generation })
            }
            0 => Err(Errno::OPNOTSUPP),
            _ => match io::Error::last_os_error().raw_os_error() {
                // It needs more bytes.
                Some(libc::EOVERFLOW) | None => Err(Errno::OPNOTSUPP),
                Some(number) => Err(Errno::from_raw_os_error(number)),
            },
        }
    }

    /// Opens the file. Needs CAP_DAC_READ_SEARCH.
    ///
    /// # Errors
    /// `ESTALE` if the file is gone.
    pub fn open(&self, mount: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
        let Handle { kind, inode, generation } = *self;
        let mut raw = Raw { bytes: INODE_BYTES, kind, inode, generation };
        let flags = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOATIME;
        // SAFETY: the kernel reads the handle, and a descriptor that it returns is nobody else's.
        unsafe {
            let handle = (&raw mut raw).cast::<libc::file_handle>();
            match libc::open_by_handle_at(mount.as_raw_fd(), handle, flags) {
                fd @ 0.. => Ok(OwnedFd::from_raw_fd(fd)),
                _ => {
                    let error = io::Error::last_os_error();
                    Err(Errno::from_io_error(&error).unwrap_or(Errno::STALE))
                }
            }
        }
    }

    /// The file's inode number.
    pub fn inode(&self) -> u64 {
        u64::from(self.inode)
    }

    fn encode(&self) -> [u8; ENTRY] {
        let words = [self.kind as u32, self.inode, self.generation].map(u32::to_ne_bytes);
        let mut bytes = [0; ENTRY];
        bytes.copy_from_slice(words.as_flattened());
        bytes
    }

    fn decode(entry: &[u8]) -> Handle {
        let word = |at: usize| {
            let bytes = [entry[at], entry[at + 1], entry[at + 2], entry[at + 3]];
            u32::from_ne_bytes(bytes)
        };
        Handle { kind: word(0) as i32, inode: word(4), generation: word(8) }
    }
}

/// The record, and the handles that were in it.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    file: File,
    handles: BTreeSet<Handle>,
}

impl Record {
    /// Opens the record, or makes an empty one.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn open(path: &Path) -> io::Result<Record> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        // A part of an entry is of a file that no program has got.
        let whole = bytes.len() / ENTRY * ENTRY;
        file.set_len(whole as u64)?;
        let handles = bytes[..whole].chunks_exact(ENTRY).map(Handle::decode).collect();
        Ok(Record { path: path.to_owned(), file, handles })
    }

    /// Notes a file before a program gets it.
    ///
    /// # Errors
    /// The file system is full, or fails.
    pub fn add(&mut self, handle: Handle) -> io::Result<()> {
        if !self.handles.contains(&handle) {
            self.file.write_all(&handle.encode())?;
            self.handles.insert(handle);
        }
        Ok(())
    }

    /// All files that may be there, in order.
    pub fn handles(&self) -> impl Iterator<Item = Handle> {
        self.handles.iter().copied()
    }

    /// Forgets files that are gone.
    ///
    /// # Errors
    /// Those of the file system. The record is as before then.
    pub fn forget(&mut self, gone: &[Handle]) -> io::Result<()> {
        if gone.is_empty() {
            return Ok(());
        }
        gone.iter().for_each(|handle| {
            self.handles.remove(handle);
        });
        let entries = self.file.metadata()?.len() as usize / ENTRY;
        if entries < COMPACT_FROM || entries < self.handles.len() * 2 {
            return Ok(());
        }
        let anew = self.path.with_extension("new");
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&anew)?;
        file.set_len(0)?;
        file.write_all(self.handles.iter().map(Handle::encode).collect::<Vec<_>>().as_flattened())?;
        std::fs::rename(&anew, &self.path)?;
        self.file = file;
        Ok(())
    }
}

/// Opens a directory as a place to open files in.
pub(crate) fn open_directory(directory: impl AsFd, name: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    rustix::fs::openat(directory, name, flags, Mode::empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(inode: u32) -> Handle {
        Handle { inode, generation: 7, kind: 1 }
    }

    #[test]
    fn a_killed_keepers_files_are_found() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("record");
        let mut record = Record::open(&path).expect("made");
        for inode in [3, 1, 3] {
            record.add(handle(inode)).expect("added");
        }
        record.file.write_all(&[1; ENTRY - 1]).expect("a part of an entry");
        let mut again = Record::open(&path).expect("opened");
        assert!(again.handles().eq([handle(1), handle(3)]));
        again.add(handle(2)).expect("added");
        let third = Record::open(&path).expect("opened");
        assert!(third.handles().eq([handle(1), handle(2), handle(3)]));
    }

    #[test]
    fn a_long_record_of_files_that_are_gone_becomes_short() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("record");
        let mut record = Record::open(&path).expect("made");
        let count = COMPACT_FROM as u32;
        (0..count).for_each(|inode| record.add(handle(inode)).expect("added"));
        let gone: Vec<_> = (1..count).map(handle).collect();
        record.forget(&gone).expect("forgotten");
        record.add(handle(9)).expect("added");
        assert_eq!(std::fs::metadata(&path).expect("there").len(), 2 * ENTRY as u64);
        let again = Record::open(&path).expect("opened");
        assert!(again.handles().eq([handle(0), handle(9)]));
    }
}
