//! The driver's interface (include/uapi/linux/ublk_cmd.h): numbers, and what they are made of.
//!
//! Commands are told apart by numbers that hold their direction and the size of their argument, as
//! those of ioctl(2) do. Integers are in the machine's order.

/// Commands to the driver, about devices.
pub(super) mod control {
    use super::{ControlCommand, code};

    const BYTES: u32 = size_of::<ControlCommand>() as u32;
    const READ: u32 = 2;
    const READ_WRITE: u32 = 3;

    /// Describes the device. With an argument of [`super::DeviceInfo`].
    pub(in super::super) const GET_DEV_INFO: u32 = code(READ, 0x02, BYTES);
    /// Makes a device. With an argument of [`super::DeviceInfo`], which is filled in.
    pub(in super::super) const ADD_DEV: u32 = code(READ_WRITE, 0x04, BYTES);
    /// Begins to serve: with the process as data. Returns when that is ready, and the device is
    /// there.
    pub(in super::super) const START_DEV: u32 = code(READ_WRITE, 0x06, BYTES);
    /// The device goes, whoever uses it.
    pub(in super::super) const STOP_DEV: u32 = code(READ_WRITE, 0x07, BYTES);
    /// Sets what the device can do. With an argument of [`super::Parameters`].
    pub(in super::super) const SET_PARAMS: u32 = code(READ_WRITE, 0x08, BYTES);
    /// The process that served it has died, and another one is about to.
    pub(in super::super) const START_USER_RECOVERY: u32 = code(READ_WRITE, 0x10, BYTES);
    /// As [`START_DEV`], of that other one.
    pub(in super::super) const END_USER_RECOVERY: u32 = code(READ_WRITE, 0x11, BYTES);
    /// Reads the features of this driver. With an argument of eight bytes.
    pub(in super::super) const GET_FEATURES: u32 = code(READ, 0x13, BYTES);
    /// The device has another size: with its 512-byte sectors as data (Linux 6.16).
    pub(in super::super) const UPDATE_SIZE: u32 = code(READ_WRITE, 0x15, BYTES);
    /// Forgets a device that was stopped, once nobody serves it any more.
    pub(in super::super) const DEL_DEV_ASYNC: u32 = code(READ, 0x14, BYTES);
}

/// Commands of a queue.
pub(super) mod io {
    use super::{IO_COMMAND_BYTES, code};

    const BYTES: u32 = IO_COMMAND_BYTES as u32;

    /// Wants the first request of a tag.
    pub(in super::super) const FETCH: u32 = code(3, 0x20, BYTES);
    /// Answers the one before, and wants the next.
    pub(in super::super) const COMMIT_AND_FETCH: u32 = code(3, 0x21, BYTES);
}

const fn code(direction: u32, number: u32, bytes: u32) -> u32 {
    direction << 30 | bytes << 16 | (b'u' as u32) << 8 | number
}

/// Features of a device, and of the driver.
pub(super) mod feature {
    /// A process that dies leaves the device, which waits for another.
    pub(in super::super) const USER_RECOVERY: u64 = 1 << 3;
    /// And what it had not answered is asked for again.
    pub(in super::super) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands have the numbers of this module (Linux 6.4).
    pub(in super::super) const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// A device may be given another size while it is used.
    pub(in super::super) const UPDATE_SIZE: u64 = 1 << 10;
    /// Features that this module cannot do without.
    pub(in super::super) const NEEDED: u64 =
        USER_RECOVERY | USER_RECOVERY_REISSUE | CMD_IOCTL_ENCODE;
}

/// State of a device.
pub(super) mod state {
    /// Not started, or stopped.
    pub(in super::super) const DEAD: u16 = 0;
    /// Served.
    pub(in super::super) const LIVE: u16 = 1;
    /// Its process has died.
    pub(in super::super) const QUIESCED: u16 = 2;
}

/// No device, or any; no queue.
pub(super) const ANY_DEVICE: u32 = u32::MAX;
pub(super) const NO_QUEUE: u16 = u16::MAX;

/// A command to the driver.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ControlCommand {
    pub(super) device: u32,
    pub(super) queue: u16,
    /// Length of the argument.
    pub(super) bytes: u16,
    /// Where it is.
    pub(super) address: u64,
    pub(super) data: u64,
    /// A path's, for devices of users without rights.
    pub(super) path_bytes: u16,
    pub(super) padding: u16,
    pub(super) reserved: u32,
}

impl ControlCommand {
    /// As it stands in the ring.
    pub(super) fn bytes(&self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[..4].copy_from_slice(&self.device.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.queue.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.bytes.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.address.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes
    }
}

/// A device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) padding: u16,
    pub(super) max_io_bytes: u32,
    pub(super) device: u32,
    pub(super) pid: i32,
    pub(super) more_padding: u32,
    pub(super) flags: u64,
    /// Flags of the device's creator: the driver keeps them, and does nothing else with them.
    pub(super) own_flags: u64,
    pub(super) owner: [u32; 2],
    pub(super) reserved: [u64; 2],
}

/// Abilities of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parameters {
    pub(super) bytes: u32,
    /// Which of the following are meant.
    pub(super) types: u32,
    pub(super) basic: BasicParameters,
    pub(super) discard: DiscardParameters,
}

impl Parameters {
    pub(super) const BASIC: u32 = 1;
    pub(super) const DISCARD: u32 = 1 << 1;
}

/// Parameters that every device has. Shifts are exponents of 2, sectors have 512 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BasicParameters {
    pub(super) attributes: u32,
    pub(super) logical_block_shift: u8,
    pub(super) physical_block_shift: u8,
    pub(super) optimal_io_shift: u8,
    pub(super) minimal_io_shift: u8,
    pub(super) max_sectors: u32,
    pub(super) chunk_sectors: u32,
    pub(super) sectors: u64,
    pub(super) boundary_mask: u64,
}

impl BasicParameters {
    pub(super) const READ_ONLY: u32 = 1;
    /// It is to be flushed.
    pub(super) const VOLATILE_CACHE: u32 = 1 << 2;
}

/// How ranges are dropped, and made zeros.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DiscardParameters {
    pub(super) alignment: u32,
    pub(super) granularity: u32,
    pub(super) max_sectors: u32,
    pub(super) max_zeroes_sectors: u32,
    pub(super) max_segments: u16,
    pub(super) reserved: u16,
}

/// A request, as the driver shows it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Descriptor {
    /// The operation in the lowest byte, flags above it.
    pub(super) operation: u32,
    pub(super) sectors: u32,
    pub(super) first_sector: u64,
    pub(super) address: u64,
}

/// Operations of requests, and the flag of `WRITE_ZEROES` that has the room kept.
pub(super) mod operation {
    pub(in super::super) const READ: u32 = 0;
    pub(in super::super) const WRITE: u32 = 1;
    pub(in super::super) const FLUSH: u32 = 2;
    pub(in super::super) const DISCARD: u32 = 3;
    pub(in super::super) const WRITE_ZEROES: u32 = 5;
    pub(in super::super) const MASK: u32 = 0xff;
    pub(in super::super) const NO_UNMAP: u32 = 1 << 15;
}

pub(super) const IO_COMMAND_BYTES: usize = 16;

/// A command of a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct IoCommand {
    pub(super) tag: u16,
    /// Result of the request before: bytes, or an error below zero.
    pub(super) result: i32,
    /// Where its data are, or are to be put.
    pub(super) address: u64,
}

impl IoCommand {
    /// As it stands in the ring: of the first queue, which is the only one.
    pub(super) fn bytes(&self) -> [u8; IO_COMMAND_BYTES] {
        let mut bytes = [0; IO_COMMAND_BYTES];
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.address.to_ne_bytes());
        bytes
    }
}

const _: () = assert!(size_of::<ControlCommand>() == 32);
const _: () = assert!(size_of::<DeviceInfo>() == 64);
const _: () = assert!(size_of::<BasicParameters>() == 32);
const _: () = assert!(size_of::<DiscardParameters>() == 20);
const _: () = assert!(size_of::<Descriptor>() == 24);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn commands_have_the_numbers_of_the_kernel() {
        assert_eq!(control::ADD_DEV, 0xc020_7504);
        assert_eq!(control::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(control::GET_FEATURES, 0x8020_7513);
        assert_eq!(control::DEL_DEV_ASYNC, 0x8020_7514);
        assert_eq!(control::UPDATE_SIZE, 0xc020_7515);
        assert_eq!(io::FETCH, 0xc010_7520);
        assert_eq!(io::COMMIT_AND_FETCH, 0xc010_7521);
    }

    #[test]
    fn fields_are_where_the_kernel_has_them() {
        assert_eq!(offset_of!(DeviceInfo, state), 4);
        assert_eq!(offset_of!(DeviceInfo, max_io_bytes), 8);
        assert_eq!(offset_of!(DeviceInfo, flags), 24);
        assert_eq!(offset_of!(Parameters, basic), 8);
        assert_eq!(offset_of!(Parameters, discard), 40);
        assert_eq!(offset_of!(BasicParameters, sectors), 16);
        let command = IoCommand { tag: 0x0102, result: -5, address: 7 };
        let bytes = command.bytes();
        assert_eq!(bytes[2..4], 0x0102u16.to_ne_bytes());
        assert_eq!(bytes[4..8], (-5i32).to_ne_bytes());
        assert_eq!(bytes[8..], 7u64.to_ne_bytes());
        let command = ControlCommand {
            device: 3,
            queue: NO_QUEUE,
            bytes: 64,
            address: 9,
            data: 11,
            ..Default::default()
        };
        let bytes = command.bytes();
        assert_eq!(bytes[..8], [3, 0, 0, 0, 255, 255, 64, 0]);
        assert_eq!(
            (bytes[8], bytes[16], bytes[24..].iter().any(|byte| *byte != 0)),
            (9, 11, false)
        );
    }
}
