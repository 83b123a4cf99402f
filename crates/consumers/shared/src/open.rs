//! Opens files of the file system with the rights of the program that asks.

use crate::record::{Handle, Record, open_directory};
use hecaton_uffd::files::{Ask, AskKind};
use rustix::fs::{AtFlags, Mode, OFlags, fchmod, ftruncate, mkdirat, openat, unlinkat};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Mutex;

/// The directory of files with names, and that of files without.
const NAMED: &str = "named";
const NAMELESS: &str = "nameless";

/// As `memfd_create` makes files: who has one open may open it anew by /proc.
const MEMORY_FILE_MODE: u32 = 0o777;
/// As in /dev/shm: all may make files, and remove their own.
const DIRECTORY_MODE: u32 = 0o1777;

/// The flags that `shm_open` passes on.
const OPEN_FLAGS: OFlags =
    OFlags::RDWR.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::TRUNC);

/// Whose rights a file is opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) groups: Vec<u32>,
}

/// The file system.
pub(crate) struct Place {
    named: OwnedFd,
    nameless: OwnedFd,
    record: Mutex<Record>,
}

impl Place {
    /// The file system with this root.
    pub(crate) fn new(root: BorrowedFd<'_>, record: Record) -> Result<Place, Errno> {
        let directory = |name| {
            match mkdirat(root, name, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
            let opened = open_directory(root, name)?;
            fchmod(&opened, Mode::from_raw_mode(DIRECTORY_MODE))?;
            Ok(opened)
        };
        Ok(Place {
            named: directory(NAMED)?,
            nameless: directory(NAMELESS)?,
            record: Mutex::new(record),
        })
    }

    /// Does what a program asks for, in a thread that has that program's [`Rights`].
    pub(crate) fn answer(&self, ask: &Ask) -> Result<Option<OwnedFd>, Errno> {
        let opened = match ask.kind().ok_or(Errno::INVAL)? {
            AskKind::Unlink => {
                unlinkat(&self.named, name(ask)?, AtFlags::empty())?;
                return Ok(None);
            }
            AskKind::Open => {
                let flags = OFlags::from_bits_retain(ask.flags) & OPEN_FLAGS;
                let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
                openat(&self.named, name(ask)?, flags, Mode::from_raw_mode(ask.mode & 0o7777))?
            }
            AskKind::Anonymous | AskKind::MemoryFile => {
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
                let mode = Mode::from_raw_mode(MEMORY_FILE_MODE);
                let made = openat(&self.nameless, ".", flags, mode)?;
                ftruncate(&made, ask.bytes)?;
                made
            }
        };
        let handle = Handle::of(&opened)?;
        let added = self.record().add(handle);
        added.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(Some(opened))
    }

    /// All files that may be there.
    pub(crate) fn handles(&self) -> Vec<Handle> {
        self.record().handles().collect()
    }

    /// Forgets files that are gone.
    pub(crate) fn forget(&self, gone: &[Handle]) {
        if let Err(error) = self.record().forget(gone) {
            tracing::warn!(%error, "the record of shared memory is not made shorter");
        }
    }

    /// Opens a file that may be gone.
    pub(crate) fn open(&self, handle: &Handle) -> Result<OwnedFd, Errno> {
        handle.open(self.nameless.as_fd())
    }

    fn record(&self) -> std::sync::MutexGuard<'_, Record> {
        self.record.lock().expect("no thread panics with it")
    }
}

/// The name, which is one of a directory.
fn name(ask: &Ask) -> Result<&[u8], Errno> {
    match ask.name() {
        b"" | b"." | b".." => Err(Errno::INVAL),
        name if name.iter().any(|byte| matches!(byte, b'/' | 0)) => Err(Errno::INVAL),
        name => Ok(name),
    }
}

impl Rights {
    /// Gives them to the calling thread: the kernel checks each file by them.
    ///
    /// # Errors
    /// The thread may not change its user.
    pub(crate) fn take(&self) -> Result<(), Errno> {
        let done = |done: libc::c_long| match done {
            0 => Ok(()),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::PERM)),
        };
        // The system calls themselves, since libc's functions change all threads.
        // SAFETY: numbers, and groups that outlive the call.
        unsafe {
            let groups = (self.groups.len(), self.groups.as_ptr());
            done(libc::syscall(libc::SYS_setgroups, groups.0, groups.1))?;
            libc::syscall(libc::SYS_setfsgid, self.group);
            libc::syscall(libc::SYS_setfsuid, self.user);
            // Each tells the number before; one that is not valid changes nothing.
            let now = [libc::SYS_setfsgid, libc::SYS_setfsuid].map(|call| libc::syscall(call, -1));
            let wanted = [self.group, self.user].map(libc::c_long::from);
            if now == wanted { Ok(()) } else { Err(Errno::PERM) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> (tempfile::TempDir, Place) {
        let dir = tempfile::tempdir().expect("a directory");
        let root = open_directory(rustix::fs::CWD, dir.path().to_str().expect("text"));
        let record = Record::open(&dir.path().join("record")).expect("made");
        let place = Place::new(root.expect("opened").as_fd(), record).expect("made");
        (dir, place)
    }

    fn ask(kind: AskKind, name: &str) -> Ask {
        Ask::new(kind, name.as_bytes()).expect("short enough")
    }

    #[test]
    fn names_stay_in_their_directory() {
        let (_dir, place) = place();
        let open = |name| {
            let mut ask = ask(AskKind::Open, name);
            (ask.flags, ask.mode) = ((OFlags::CREATE | OFlags::RDWR | OFlags::PATH).bits(), 0o600);
            ask
        };
        for bad in ["", ".", "..", "a/b", "a\0b"] {
            assert_eq!(place.answer(&open(bad)).expect_err("refused"), Errno::INVAL, "{bad:?}");
        }
        assert!(place.answer(&open("a")).expect("made").is_some());
        assert!(place.answer(&ask(AskKind::Unlink, "a")).expect("removed").is_none());
        let gone = place.answer(&ask(AskKind::Unlink, "a"));
        assert_eq!(gone.expect_err("gone"), Errno::NOENT);
    }

    #[test]
    fn files_are_known_for_as_long_as_they_are_used() {
        let (_dir, place) = place();
        let mut ask = ask(AskKind::Anonymous, "");
        ask.bytes = 8192;
        let file = match place.answer(&ask) {
            Ok(file) => file.expect("a file"),
            Err(Errno::OPNOTSUPP) => {
                println!("skipped: the file system of temporary files has no such handles");
                return;
            }
            Err(errno) => panic!("{errno}"),
        };
        let [handle] = place.handles()[..] else { panic!("one file") };
        let opened = match place.open(&handle) {
            Err(Errno::PERM) => {
                println!("skipped: opening by handle needs root");
                return;
            }
            opened => opened.expect("it is used"),
        };
        assert_eq!(rustix::fs::fstat(&opened).expect("known").st_size, 8192);
        drop((opened, file));
        assert_eq!(place.open(&handle).expect_err("gone"), Errno::STALE);
        place.forget(&[handle]);
        assert_eq!(place.handles(), []);
    }
}
