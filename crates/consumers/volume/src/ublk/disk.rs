//! A device. Its owner keeps the number, so that the device outlives the processes that serve it.

use super::Owner;
use super::abi::state;
use super::control::{Control, UblkError};
use crate::attach::Role;
use crate::holders::holders;
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long a process may take until it serves a device.
const PATIENCE: Duration = Duration::from_secs(20);

/// Between two looks at a device.
const POLL: Duration = Duration::from_millis(20);

/// Between two looks at whether one is used.
const UNUSED_POLL: Duration = Duration::from_millis(200);

/// The device of that number, which is there while it is served.
pub fn path(number: u32) -> PathBuf {
    format!("/dev/ublkb{number}").into()
}

/// A device. It goes when this is dropped, whoever uses it.
#[derive(Debug)]
pub struct Disk {
    number: u32,
    path: PathBuf,
    control: Control,
}

impl Disk {
    /// Makes one of so many bytes, which appears when it is served.
    pub fn new(bytes: u64, role: Role, owner: Owner) -> Result<Disk, UblkError> {
        let control = Control::open()?;
        let number = control.add(bytes, role, owner)?;
        Ok(Disk { number, path: path(number), control })
    }

    /// One of somebody who is gone, with what it gave to those that serve it.
    pub fn adopt(number: u32, control: OwnedFd) -> Disk {
        Disk { number, path: path(number), control: Control::from_fd(control) }
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Disk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        remove(&self.control, self.number);
    }
}

pub(super) fn remove(control: &Control, number: u32) {
    let gone = control.stop(number).and_then(|()| control.delete(number));
    match gone {
        // It is gone by now.
        Ok(()) | Err(UblkError::Refused { errno: Errno::NODEV, .. }) => {}
        Err(error) => tracing::warn!(number, %error, "a block device is left"),
    }
}

/// Waits until somebody serves the device, and it is there.
pub fn wait_until_served(number: u32) -> Result<(), UblkError> {
    let control = Control::open()?;
    let until = Instant::now() + PATIENCE;
    while control.info(number)?.state != state::LIVE {
        if Instant::now() > until {
            return Err(UblkError::Unserved { number, seconds: PATIENCE.as_secs() });
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Whether somebody uses the device: has it open, mounted, as a loop device's, or swaps to it.
pub fn is_in_use(path: &Path) -> bool {
    // A mount, or a swap area, has the device exclusively.
    let device = open(path, OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC, Mode::empty());
    let is_claimed = device.err() == Some(Errno::BUSY);
    is_claimed || !holders(path).is_empty()
}

/// Ends a device: it is gone from this host, and who has it open finds errors. The one who serves
/// it finds that there is nothing to serve.
pub fn stop(number: u32) -> Result<(), UblkError> {
    Control::open()?.stop(number)
}

/// Removes a device as soon as nobody uses it; for a process that serves it on without the one who
/// made it.
pub fn remove_when_unused(number: u32) {
    let path = path(number);
    while is_in_use(&path) {
        thread::sleep(UNUSED_POLL);
    }
    match Control::open() {
        Ok(control) => remove(&control, number),
        Err(error) => tracing::warn!(number, %error, "a block device is left"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_them_is_one_clear_line() {
        match Disk::new(1 << 20, Role::Writer, Owner::of(Path::new("/"))) {
            // Nobody serves it: it is not there.
            Ok(disk) => assert!(!disk.path().exists() && disk.path().starts_with("/dev")),
            Err(error) => {
                let line = error.to_string();
                assert!(line.contains("--nbd") && !line.contains('\n'), "{line}");
                println!("skipped: a block device is made: {line}");
            }
        }
    }
}
