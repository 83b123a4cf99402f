//! Commands to the driver: devices are made, started and removed.
//!
//! A command goes through a ring of its own, for there are few of them, and some wait: to start a
//! device until somebody serves it.

use super::Owner;
use super::abi::{
    ANY_DEVICE, BasicParameters, ControlCommand, DeviceInfo, DiscardParameters, NO_QUEUE,
    Parameters, control, feature,
};
use crate::attach::Role;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::ptr;

pub(super) const DEVICE: &str = "/dev/ublk-control";

/// Requests of a device that are under way at a time.
pub(super) const DEPTH: u16 = 64;

/// Longest read or write: the kernel cuts longer ones.
pub(super) const MAX_IO_BYTES: usize = 256 << 10;

/// Longest range that is dropped, or made zeros, in one request.
const MAX_RANGE_SECTORS: u32 = 1 << 21;

pub(super) const SECTOR: u64 = 512;
const SECTOR_SHIFT: u8 = 9;
/// Pages are what costs least.
const PAGE_SHIFT: u8 = 12;

/// Why a volume cannot be a block device of this host.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// No driver.
    #[error(
        "this kernel has no ublk: {DEVICE} cannot be opened ({0}). `modprobe ublk_drv` loads it where there is one \
         (Linux 6.4 with CONFIG_BLK_DEV_UBLK), and the node must run as root; --nbd, --vhost-user and --fuse need none"
    )]
    Driver(Errno),
    /// No rings to talk to it.
    #[error(
        "this system allows no io_uring ({0}), which block devices are served through: see \
         /proc/sys/kernel/io_uring_disabled; --nbd, --vhost-user and --fuse need none"
    )]
    Uring(#[source] io::Error),
    /// A driver of before Linux 6.4.
    #[error(
        "the ublk of this kernel cannot do what is needed: Linux 6.4 is; --nbd, --vhost-user and --fuse need none of it"
    )]
    Old,
    /// The driver refuses.
    #[error("the kernel does not {what}: {errno}")]
    Refused {
        /// Action that the driver refuses.
        what: &'static str,
        /// Why not.
        errno: Errno,
    },
    /// Nobody has begun to serve it.
    #[error("{} is not served after {} s; the log of the node says why", super::disk::path(*.number).display(), .seconds)]
    Unserved {
        /// The device.
        number: u32,
        /// How long it was waited for.
        seconds: u64,
    },
}

/// Whether this kernel can make a volume a block device, and this user may have it do so.
pub fn check() -> Result<(), UblkError> {
    Control::open().map(drop)
}

/// The way to the driver.
#[derive(Debug)]
pub(super) struct Control(OwnedFd);

impl Control {
    /// If there is a driver that can do what is needed.
    pub(super) fn open() -> Result<Control, UblkError> {
        let device = open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let control = Control(device.map_err(UblkError::Driver)?);
        match control.features()? {
            features if features & feature::NEEDED == feature::NEEDED => Ok(control),
            _ => Err(UblkError::Old),
        }
    }

    /// Reads the features of the driver.
    fn features(&self) -> Result<u64, UblkError> {
        let mut features = 0u64;
        match self.ask(control::GET_FEATURES, ANY_DEVICE, 0, Some(&mut features)) {
            Ok(()) => Ok(features),
            // One that does not know the question has another number for it.
            Err(Wrong::Refused(Errno::OPNOTSUPP | Errno::NODEV | Errno::INVAL)) => {
                Err(UblkError::Old)
            }
            Err(wrong) => Err(wrong.on("tell what its ublk can do")),
        }
    }

    /// Whether a device may be given another size while it is used.
    pub(super) fn can_resize(&self) -> Result<bool, UblkError> {
        Ok(self.features()? & feature::UPDATE_SIZE != 0)
    }

    /// A device that is there has so many bytes from now on; its users are told. One whose driver
    /// can do this, and not one that has been stopped: it has no disk, and not every driver looks
    /// for that.
    pub(super) fn resize(&self, number: u32, bytes: u64) -> Result<(), UblkError> {
        self.ask(control::UPDATE_SIZE, number, bytes / SECTOR, None::<&mut u64>)
            .map_err(|wrong| wrong.on("give a block device another size"))
    }

    /// The same way, from who has it open.
    pub(super) fn from_fd(fd: OwnedFd) -> Control {
        Control(fd)
    }

    pub(super) fn try_clone(&self) -> io::Result<Control> {
        self.0.try_clone().map(Control)
    }

    /// Makes a device, and returns its number. It is there once somebody serves it.
    pub(super) fn add(&self, bytes: u64, role: Role, owner: Owner) -> Result<u32, UblkError> {
        let mut info = DeviceInfo {
            queues: 1,
            depth: DEPTH,
            max_io_bytes: MAX_IO_BYTES as u32,
            device: ANY_DEVICE,
            flags: feature::NEEDED,
            own_flags: owner.0,
            ..DeviceInfo::default()
        };
        self.ask(control::ADD_DEV, ANY_DEVICE, 0, Some(&mut info))
            .map_err(|wrong| wrong.on("make a block device"))?;
        let mut parameters = parameters(bytes, role);
        let set = self.ask(control::SET_PARAMS, info.device, 0, Some(&mut parameters));
        if let Err(wrong) = set {
            let _ = self.delete(info.device);
            return Err(wrong.on("take what the block device is to be like"));
        }
        Ok(info.device)
    }

    pub(super) fn info(&self, number: u32) -> Result<DeviceInfo, UblkError> {
        let mut info = DeviceInfo::default();
        self.ask(control::GET_DEV_INFO, number, 0, Some(&mut info))
            .map_err(|wrong| wrong.on("tell of a block device"))?;
        Ok(info)
    }

    /// Begins to serve, by this process: `command` is one of two. Returns when all of its queue is
    /// being served.
    pub(super) fn start(&self, command: u32, number: u32) -> Result<(), UblkError> {
        let pid = std::process::id().into();
        self.ask(command, number, pid, None::<&mut u64>)
            .map_err(|wrong| wrong.on("start a block device"))
    }

    /// Another process is about to serve it. Refused for as long as the one before is not known to
    /// be dead.
    pub(super) fn begin_recovery(&self, number: u32) -> Result<(), UblkError> {
        self.ask(control::START_USER_RECOVERY, number, 0, None::<&mut u64>)
            .map_err(|wrong| wrong.on("have another process serve a block device"))
    }

    /// The device goes, whoever uses it: its requests fail.
    pub(super) fn stop(&self, number: u32) -> Result<(), UblkError> {
        self.ask(control::STOP_DEV, number, 0, None::<&mut u64>)
            .map_err(|wrong| wrong.on("stop a block device"))
    }

    /// Its number is free, once nobody serves it any more.
    pub(super) fn delete(&self, number: u32) -> Result<(), UblkError> {
        self.ask(control::DEL_DEV_ASYNC, number, 0, None::<&mut u64>)
            .map_err(|wrong| wrong.on("remove a block device"))
    }

    fn ask<T: Copy>(
        &self,
        command: u32,
        device: u32,
        data: u64,
        argument: Option<&mut T>,
    ) -> Result<(), Wrong> {
        let mut ring: IoUring<squeue::Entry128, cqueue::Entry> =
            IoUring::builder().build(1).map_err(Wrong::Uring)?;
        let bytes = if argument.is_some() { size_of::<T>() as u16 } else { 0 };
        let address =
            argument.map_or(0, |argument| ptr::from_mut(argument).expose_provenance() as u64);
        let asked = ControlCommand {
            device,
            queue: NO_QUEUE,
            bytes,
            address,
            data,
            ..ControlCommand::default()
        };
        let entry = opcode::UringCmd80::new(types::Fd(self.0.as_raw_fd()), command)
            .cmd(asked.bytes())
            .build();
        // SAFETY: the descriptor and the argument are there until the answer is, which is waited
        // for below.
        unsafe { ring.submission().push(&entry) }.expect("the ring is empty");
        loop {
            match ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Wrong::Uring(error)),
            }
            if let Some(answer) = ring.completion().next() {
                return match answer.result() {
                    0.. => Ok(()),
                    error => Err(Wrong::Refused(Errno::from_raw_os_error(-error))),
                };
            }
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

enum Wrong {
    Uring(io::Error),
    Refused(Errno),
}

impl Wrong {
    fn on(self, what: &'static str) -> UblkError {
        match self {
            Wrong::Uring(error) => UblkError::Uring(error),
            Wrong::Refused(errno) => UblkError::Refused { what, errno },
        }
    }
}

fn parameters(bytes: u64, role: Role) -> Parameters {
    let mut attributes = BasicParameters::VOLATILE_CACHE;
    let mut types = Parameters::BASIC;
    match role {
        Role::Reader => attributes |= BasicParameters::READ_ONLY,
        Role::Writer => types |= Parameters::DISCARD,
    }
    Parameters {
        bytes: size_of::<Parameters>() as u32,
        types,
        basic: BasicParameters {
            attributes,
            logical_block_shift: SECTOR_SHIFT,
            physical_block_shift: PAGE_SHIFT,
            optimal_io_shift: PAGE_SHIFT,
            minimal_io_shift: PAGE_SHIFT,
            max_sectors: (MAX_IO_BYTES as u64 / SECTOR) as u32,
            sectors: bytes / SECTOR,
            ..BasicParameters::default()
        },
        discard: DiscardParameters {
            granularity: 1 << PAGE_SHIFT,
            max_sectors: MAX_RANGE_SECTORS,
            max_zeroes_sectors: MAX_RANGE_SECTORS,
            max_segments: 1,
            ..DiscardParameters::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_as_large_as_its_volume_and_who_reads_cannot_drop() {
        let writer = parameters(8192, Role::Writer);
        assert_eq!((writer.basic.sectors, writer.basic.attributes), (16, 4));
        assert_eq!((writer.types, writer.discard.granularity), (3, 4096));
        let reader = parameters(8192, Role::Reader);
        assert_eq!((reader.basic.attributes, reader.types), (5, 1));
        assert_eq!(reader.bytes, 64);
    }
}
