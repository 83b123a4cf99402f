//! How FUSE is spoken over io_uring (include/uapi/linux/fuse.h, Linux 6.14): commands, and what the
//! kernel and a queue show each other.
//!
//! An entry of a queue is a piece of memory for one request at a time, and a command of io_uring
//! that ends as the kernel has put a request there. Its answer is put there, too, and taken by the
//! next command.

use io_uring::{opcode, squeue, types};
use std::mem::offset_of;
use std::ptr;

/// Gives the kernel an entry, for a first request.
pub(super) const REGISTER: u32 = 1;
/// Gives it the answer to a request, for the next one.
pub(super) const COMMIT_AND_FETCH: u32 = 2;

/// Headers before the data of a request and of its answer (`struct fuse_uring_req_header`).
#[repr(C)]
pub(super) struct Headers {
    /// The header of a request, then that of its answer.
    pub(super) header: [u8; 128],
    pub(super) arguments: [u8; 128],
    pub(super) flags: u64,
    pub(super) commit_id: u64,
    /// Length of the data in bytes.
    pub(super) payload_bytes: u32,
    pub(super) padding: u32,
    pub(super) reserved: u64,
}

const _: () = assert!(size_of::<Headers>() == 288);

/// Where an entry's memory is.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// The two memory areas that [`REGISTER`] points to: headers, then data.
pub(super) type Places = [Place; 2];

const _: () = assert!(size_of::<Places>() == 2 * size_of::<libc::iovec>());

/// Bytes of a command in the ring.
const COMMAND_BYTES: usize = 80;

/// Arguments of a command (`struct fuse_uring_cmd_req`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Command {
    pub(super) queue: u16,
    /// The request that is answered.
    pub(super) commit_id: u64,
}

impl Command {
    fn bytes(self) -> [u8; COMMAND_BYTES] {
        let mut bytes = [0; COMMAND_BYTES];
        bytes[8..16].copy_from_slice(&self.commit_id.to_ne_bytes());
        bytes[16..18].copy_from_slice(&self.queue.to_ne_bytes());
        bytes
    }

    /// The first command of an entry, which has its memory at these places.
    pub(super) fn register(self, device: types::Fd, places: *const Places) -> squeue::Entry128 {
        let command = opcode::UringCmd80::new(device, REGISTER).cmd(self.bytes());
        let mut entry = command.addr(Some(places.expose_provenance() as u64)).build();
        let length = size_of::<Places>() / size_of::<Place>();
        // The crate sets no length. SAFETY: an entry of 128 bytes is `struct io_uring_sqe` and the
        // rest of its command, and has its length there.
        unsafe { ptr::from_mut(&mut entry).cast::<u32>().byte_add(LENGTH_AT).write(length as u32) };
        entry
    }

    /// Each further one.
    pub(super) fn commit(self, device: types::Fd) -> squeue::Entry128 {
        opcode::UringCmd80::new(device, COMMIT_AND_FETCH).cmd(self.bytes()).build()
    }
}

/// Where `struct io_uring_sqe` has its length.
const LENGTH_AT: usize = 24;

const _: () = assert!(size_of::<squeue::Entry128>() == 128);
const _: () = assert!(offset_of!(Headers, flags) == 256);

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry of the ring, as the kernel reads it.
    fn bytes_of(entry: squeue::Entry128) -> [u8; 128] {
        // SAFETY: an entry is integers, and nothing else.
        unsafe { std::mem::transmute::<squeue::Entry128, [u8; 128]>(entry) }
    }

    fn u64_at(bytes: &[u8], at: usize) -> u64 {
        u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn fields_are_where_the_kernel_has_them() {
        assert_eq!(size_of::<Headers>(), 288);
        assert_eq!(offset_of!(Headers, arguments), 128);
        assert_eq!(offset_of!(Headers, commit_id), 264);
        assert_eq!(offset_of!(Headers, payload_bytes), 272);
        assert_eq!(offset_of!(Place, bytes), offset_of!(libc::iovec, iov_len));
        let places = [Place { address: 1, bytes: 2 }; 2];
        let command = Command { queue: 0x0102, commit_id: 7 };
        let bytes = bytes_of(command.register(types::Fd(5), &places));
        // IORING_OP_URING_CMD, the descriptor, the command, and two places.
        assert_eq!((bytes[0], bytes[4], bytes[8], bytes[24]), (46, 5, 1, 2));
        assert_eq!(u64_at(&bytes, 16), (&raw const places).addr() as u64);
        let bytes = bytes_of(command.commit(types::Fd(5)));
        assert_eq!((bytes[0], bytes[8], bytes[24]), (46, 2, 0));
        assert_eq!((u64_at(&bytes, 48), u64_at(&bytes, 56)), (0, 7));
        assert_eq!(u64_at(&bytes, 64), 0x0102);
    }
}
