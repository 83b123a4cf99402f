//! Doing what the kernel asks for.

use super::abi::{Descriptor, operation};
use super::control::{MAX_IO_BYTES, SECTOR};
use crate::BlockError;
use crate::attach::Role;
use crate::volume::Volume;
use rustix::io::Errno;
use std::sync::Arc;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) tag: u16,
    operation: u32,
    offset: u64,
    bytes: u64,
}

impl Request {
    pub(super) fn decode(tag: u16, descriptor: Descriptor) -> Request {
        Request {
            tag,
            operation: descriptor.operation,
            // Beyond every volume, where it cannot be.
            offset: descriptor.first_sector.saturating_mul(SECTOR),
            bytes: u64::from(descriptor.sectors) * SECTOR,
        }
    }

    /// Does it, with the data of a write in the buffer, and those of a read to be put there.
    /// Returns what the driver is told: bytes that were read or written, or an error below zero.
    pub(super) fn serve(&self, volume: &Arc<Volume>, role: Role, buffer: &mut [u8]) -> i32 {
        match self.do_it(volume, role, buffer) {
            Ok(bytes) => bytes as i32,
            Err(errno) => -errno.raw_os_error(),
        }
    }

    fn do_it(&self, volume: &Arc<Volume>, role: Role, buffer: &mut [u8]) -> Result<usize, Errno> {
        let Request { offset, bytes, .. } = *self;
        let failed = |error: BlockError| error.errno();
        let kind = self.operation & operation::MASK;
        let changes =
            matches!(kind, operation::WRITE | operation::DISCARD | operation::WRITE_ZEROES);
        if changes && role == Role::Reader {
            return Err(Errno::ROFS);
        }
        match kind {
            operation::READ | operation::WRITE => {
                let length = usize::try_from(bytes).ok().filter(|length| *length <= MAX_IO_BYTES);
                let data = length.and_then(|length| buffer.get_mut(..length));
                let data = data.ok_or(Errno::INVAL)?;
                if kind == operation::READ {
                    volume.read(offset, data).map_err(|(_, error)| failed(error))?;
                } else {
                    volume.write(offset, data).map_err(failed)?;
                }
                Ok(data.len())
            }
            operation::FLUSH => volume.flush().map(|()| 0).map_err(failed),
            operation::DISCARD => volume.trim(offset, bytes).map(|()| 0).map_err(failed),
            operation::WRITE_ZEROES => {
                let allocate = self.operation & operation::NO_UNMAP != 0;
                volume.write_zeroes(offset, bytes, allocate).map(|()| 0).map_err(failed)
            }
            _ => Err(Errno::OPNOTSUPP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::tests::{World, read};
    use hecaton_memory::SplitMix;

    fn request(operation: u32, first_sector: u64, sectors: u32) -> Request {
        Request::decode(0, Descriptor { operation, sectors, first_sector, address: 0 })
    }

    #[test]
    fn what_the_kernel_asks_for_is_done() {
        let world = World::new(1, 1, 64);
        let volume = world.volume();
        let serve =
            |request: Request, buffer: &mut [u8]| request.serve(&volume, Role::Writer, buffer);
        let mut buffer = vec![7; 8192];
        assert_eq!(serve(request(operation::WRITE, 3, 16), &mut buffer), 8192);
        let mut back = vec![0; 8192];
        assert_eq!(serve(request(operation::READ, 3, 16), &mut back), 8192);
        assert_eq!(back, buffer);
        assert_eq!(serve(request(operation::FLUSH, 0, 0), &mut []), 0);
        assert_eq!(serve(request(operation::DISCARD, 8, 8), &mut []), 0);
        assert_eq!(read(&volume, 4096, 4096), [0; 4096]);
        assert_eq!(read(&volume, 3 * 512, 512), [7; 512]);
        let allocate = operation::WRITE_ZEROES | operation::NO_UNMAP;
        assert_eq!(serve(request(allocate, 3, 1), &mut []), 0);
        assert_eq!(read(&volume, 3 * 512, 512), [0; 512]);
        volume.release().unwrap();
    }

    #[test]
    fn what_cannot_be_is_an_error_and_does_no_harm() {
        let world = World::new(1, 1, 64);
        let volume = world.volume();
        volume.write(0, &[7; 4096]).unwrap();
        let mut buffer = vec![9; 4096];
        let invalid = -Errno::INVAL.raw_os_error();
        for (operation, first, sectors) in [
            (operation::READ, 511, 2),
            (operation::WRITE, 512, 1),
            (operation::WRITE, u64::MAX, 1),
            (operation::WRITE, 0, 9),
            (operation::DISCARD, 500, 100),
            (operation::WRITE_ZEROES, u64::MAX / 512, 1),
        ] {
            let request = request(operation, first, sectors);
            assert_eq!(request.serve(&volume, Role::Writer, &mut buffer), invalid, "{request:?}");
        }
        let unknown = -Errno::OPNOTSUPP.raw_os_error();
        assert_eq!(request(99, 0, 1).serve(&volume, Role::Writer, &mut buffer), unknown);
        let read_only = -Errno::ROFS.raw_os_error();
        for operation in [operation::WRITE, operation::DISCARD, operation::WRITE_ZEROES] {
            let refused = request(operation, 0, 8).serve(&volume, Role::Reader, &mut buffer);
            assert_eq!(refused, read_only);
        }
        assert_eq!(read(&volume, 0, 4096), [7; 4096]);
        volume.release().unwrap();
    }

    #[test]
    fn any_descriptor_is_answered() {
        let world = World::new(1, 1, 16);
        let volume = world.volume();
        let mut random = SplitMix::new(1);
        let mut buffer = vec![1; 4096];
        for _ in 0..3000 {
            let (word, place) = (random.draw(), random.draw());
            // Half of them near the volume's end.
            let first = if word & 1 == 0 { place % 140 } else { place };
            let request = request(word as u32 >> 8, first, (word >> 40) as u32 % 12);
            let answer = request.serve(&volume, Role::Writer, &mut buffer);
            assert!((-4095..=4096).contains(&answer), "{request:?}: {answer}");
        }
        volume.release().unwrap();
    }
}
