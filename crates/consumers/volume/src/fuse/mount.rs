//! Mounts a volume as a FUSE file. The owner of a [`Mount`] keeps its `/dev/fuse` descriptor open,
//! so the file outlives the processes that serve it.
//!
//! A killed process leaves requests that it has read and not answered. While a descriptor stays
//! open, the kernel waits for their answers. It sends the requests again on demand
//! ([`Mount::resend`]), and the successor reads them like any others. Repeating a write is safe:
//! the first one was never answered, so the repeated one cannot overwrite newer data.
//!
//! Linux before 6.9 cannot resend. The file is mounted anew there: programs that had it open get
//! ENOTCONN, and programs that open it later find it unchanged.

use crate::attach::Role;
use hecaton_fuse::wire;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const DEVICE: &str = "/dev/fuse";

/// Between two attempts to unmount.
const UNUSED_POLL: Duration = Duration::from_millis(200);

/// File system type in the list of mounts.
const TYPE: &str = "fuse.hecaton";

/// Why a volume cannot be shown as a file.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// There is something else.
    #[error(
        "{} is no place for a volume's file: name one that is not there, or an empty file that \
         nothing is mounted on",
        .0.display()
    )]
    Taken(PathBuf),
    /// The empty file cannot be made or looked at.
    #[error("cannot make {}: {source}", .path.display())]
    Place {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No FUSE.
    #[error(
        "{DEVICE} cannot be opened ({0}); `modprobe fuse` loads what is behind it, and the node \
         must run as root"
    )]
    Device(Errno),
    /// The kernel refuses.
    #[error("cannot mount a file system on {}: {source}{}", .path.display(), way_out(.source))]
    Mount {
        /// Where.
        path: PathBuf,
        /// Why.
        source: Errno,
    },
}

fn way_out(errno: &Errno) -> &'static str {
    match *errno {
        Errno::PERM => "; run the node as root, or with CAP_SYS_ADMIN",
        Errno::NODEV => "; the kernel has no FUSE",
        _ => "",
    }
}

/// A mount. It goes when this is dropped, at once for those who come after that.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    volume: String,
    /// A [`Role::Reader`] has the file mounted read-only.
    role: Role,
    /// `None` while it is being replaced, or after the end.
    device: Option<OwnedFd>,
    /// The file was not there before.
    is_ours: bool,
}

impl Mount {
    /// Mounts a volume's file. Its first reader waits until somebody serves the device.
    pub fn new(path: &Path, volume: &str, role: Role) -> Result<Mount, MountError> {
        let is_ours = prepare(path)?;
        let (path, volume) = (path.to_owned(), volume.to_owned());
        let mut mount = Mount { path, volume, role, device: None, is_ours };
        mount.device = Some(mount.attach()?);
        Ok(mount)
    }

    /// A mount of somebody who is gone.
    pub fn adopt(path: PathBuf, volume: &str, role: Role, device: OwnedFd) -> Mount {
        // Nothing tells who created the file below the mount: it stays, empty.
        Mount { path, volume: volume.to_owned(), role, device: Some(device), is_ours: false }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Has a successor find what its predecessor had read and not answered. Nobody reads the device
    /// meanwhile.
    pub fn resend(&mut self) -> Result<(), MountError> {
        if let Err(errno) = rustix::io::write(self.as_fd(), &wire::resend()) {
            let path = self.path.display();
            tracing::warn!(
                volume = self.volume,
                %path,
                %errno,
                "the kernel cannot send again what was not answered; the file is mounted anew, and \
                 who had it open has lost it"
            );
            self.replace()?;
        }
        Ok(())
    }

    /// Mounts the file anew: who had it open has lost it, and what waits ends.
    pub fn replace(&mut self) -> Result<(), MountError> {
        self.device = None;
        // The kernel may still hold a descriptor of the killed process.
        unmount_by_force(&self.path);
        self.device = Some(self.attach()?);
        Ok(())
    }

    /// Whether somebody has the file open, or uses it in another way.
    pub fn is_in_use(&self) -> bool {
        is_in_use(&self.path)
    }

    fn attach(&self) -> Result<OwnedFd, MountError> {
        let device = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let device = device.map_err(MountError::Device)?;
        let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
        let options = format!(
            "fd={},rootmode=100000,user_id={},group_id={},default_permissions",
            device.as_raw_fd(),
            user.as_raw(),
            group.as_raw()
        );
        let options = CString::new(options).expect("numbers have no zeros");
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
        flags.set(MountFlags::RDONLY, self.role == Role::Reader);
        mount(self.volume.as_str(), &self.path, TYPE, flags, options.as_c_str())
            .map_err(|source| MountError::Mount { path: self.path.clone(), source })?;
        Ok(device)
    }
}

impl AsFd for Mount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.device.as_ref().expect("it is mounted").as_fd()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // The descriptor first: whoever unmounts waits for what the file has dirty, and nobody
        // answers any more.
        if self.device.take().is_some() && is_mounted(&self.path) {
            detach(&self.path);
        }
        if self.is_ours {
            // Somebody else may have removed it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Whether somebody uses what is mounted there: has it open, mapped, as a loop device's file.
fn is_in_use(path: &Path) -> bool {
    // The first call with MNT_EXPIRE unmounts nothing: it fails with EBUSY or sets an expiry mark.
    let busy = unmount(path, UnmountFlags::EXPIRE | UnmountFlags::NOFOLLOW) == Err(Errno::BUSY);
    // Opening the path clears the expiry mark. O_PATH sends the server no request.
    let _ = open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty());
    busy
}

/// Unmounts a volume's file as soon as nobody uses it; for a process that serves it on without the
/// one who mounted it.
pub fn unmount_when_unused(path: &Path) {
    while unmount_unused(path) == Ok(false) {
        std::thread::sleep(UNUSED_POLL);
    }
}

/// Unmounts a volume's file if nobody uses it, which somebody serves meanwhile: what is still in
/// the page cache is written. Whether it was.
pub fn unmount_unused(path: &Path) -> Result<bool, Errno> {
    match unmount(path, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Unmounts a volume's file whoever uses it: whatever they ask for from then on fails, and what is
/// in the page cache and not written yet is lost.
pub fn unmount_by_force(path: &Path) {
    // This ends the connection to whoever serves it, and unmounts only what is not in use.
    if unmount(path, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW).is_err() {
        detach(path);
    }
}

fn detach(path: &Path) {
    if let Err(error) = unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        tracing::warn!(path = %path.display(), %error, "cannot unmount a volume's file");
    }
}

/// Makes sure that there is an empty file, and tells whether it was made for this.
fn prepare(path: &Path) -> Result<bool, MountError> {
    if is_dead(path) {
        detach(path);
    }
    let failed = |source| MountError::Place { path: path.to_owned(), source };
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_file() && found.len() == 0 => Ok(false),
        Ok(_) => Err(MountError::Taken(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut options = File::options();
            options.write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
            Ok(true)
        }
        Err(error) => Err(failed(error)),
    }
}

/// Whether a mount of ours is there that nobody serves any more, as a killed node leaves it.
fn is_dead(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| {
        error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) && is_mounted(path)
    })
}

/// Whether a volume's file is mounted there. Nothing is asked of who serves it.
fn is_mounted(path: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // The kernel names the directory that symbolic links lead to. The file itself may be dead.
    let real = path.parent().and_then(|dir| Some(dir.canonicalize().ok()?.join(path.file_name()?)));
    let mut place = String::new();
    for letter in real.as_deref().unwrap_or(path).to_string_lossy().chars() {
        match letter {
            // As the kernel writes what would break its lines.
            ' ' | '\t' | '\n' | '\\' => place.push_str(&format!("\\{:03o}", letter as u32)),
            _ => place.push(letter),
        }
    }
    mounts
        .lines()
        .any(|line| line.split(' ').nth(4) == Some(&place) && line.contains(&format!(" - {TYPE} ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mount on `path`, or nothing where this is not allowed.
    fn mounted(path: &Path) -> Option<Mount> {
        match Mount::new(path, "disk", Role::Writer) {
            Ok(mount) => Some(mount),
            Err(error @ (MountError::Device(_) | MountError::Mount { .. })) => {
                println!("skipped: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn mounts_on(path: &Path) -> usize {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        mounts.lines().filter(|line| line.split(' ').nth(4) == path.to_str()).count()
    }

    #[test]
    fn one_that_is_replaced_is_mounted_once_and_nothing_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        let Some(mut mount) = mounted(&path) else { return };
        // Linux before 6.9 refuses, and it is replaced.
        mount.resend().unwrap();
        mount.replace().unwrap();
        assert_eq!(mounts_on(&path), 1);
        assert!(!mount.is_in_use() && !mount.is_in_use());
        assert_eq!(mounts_on(&path), 1, "looking does not unmount");
        drop(mount);
        assert_eq!(mounts_on(&path), 0);
        assert!(!path.exists());
    }

    #[test]
    fn one_is_unmounted_where_nobody_uses_it_or_by_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a disk");
        for force in [false, true] {
            let Some(mount) = mounted(&path) else { return };
            assert!(is_mounted(&path));
            match force {
                false => assert_eq!(unmount_unused(&path), Ok(true)),
                true => unmount_by_force(&path),
            }
            assert!(!is_mounted(&path) && path.is_file());
            drop(mount);
            assert!(!path.exists());
        }
        assert_eq!(unmount_unused(&path), Err(Errno::NOENT));
    }

    #[test]
    fn one_that_a_killed_node_left_is_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).unwrap();
        for named in [path.clone(), dir.path().join("link/disk")] {
            let Some(mut mount) = mounted(&named) else { return };
            // As if the process was killed: nothing unmounts.
            mount.device = None;
            std::mem::forget(mount);
            assert_eq!(mounts_on(&path), 1);
            drop(Mount::new(&named, "disk", Role::Reader).unwrap());
            assert_eq!(mounts_on(&path), 0);
        }
    }

    #[test]
    fn only_an_empty_place_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        fs::write(file("full"), "data").unwrap();
        fs::write(file("empty"), "").unwrap();
        std::os::unix::fs::symlink(file("empty"), file("link")).unwrap();
        for taken in [dir.path(), &file("full"), &file("link")] {
            assert!(matches!(prepare(taken), Err(MountError::Taken(path)) if path == taken));
        }
        assert!(matches!(prepare(&file("none/file")), Err(MountError::Place { .. })));
        assert!(!prepare(&file("empty")).unwrap());
        assert!(prepare(&file("new")).unwrap() && file("new").is_file());
    }
}
