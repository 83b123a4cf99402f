//! The requests of a virtio-blk device (virtio 1.2, section 5.2.6): what a guest wants, and doing
//! it.

use super::Memory;
use super::chain::{Buffers, Chain, Gone};
use super::config::{MAX_RANGE_SECTORS, MAX_RANGES, SECTOR};
use super::drive::Drive;
use crate::BlockError;
use crate::attach::Role;
use crate::volume::flow;
use hecaton_memory::PAGE_SIZE;
use virtio_bindings::virtio_blk as blk;

/// Data are moved in parts of this size, through a buffer that a thread keeps.
pub(super) const PART_BYTES: usize = 256 << 10;

const HEAD_BYTES: u64 = 16;

/// Longest a drive's name is.
const ID_BYTES: usize = blk::VIRTIO_BLK_ID_BYTES as usize;

const RANGE_BYTES: usize = 16;

/// How a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    Done = blk::VIRTIO_BLK_S_OK as u8,
    Failed = blk::VIRTIO_BLK_S_IOERR as u8,
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as u8,
}

/// Decoded request of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wish {
    Read { offset: u64, bytes: u64 },
    Write { offset: u64, bytes: u64 },
    Flush,
    Id,
    Drop { is_discard: bool, ranges: usize },
}

impl Wish {
    fn changes_anything(self) -> bool {
        match self {
            Wish::Write { .. } | Wish::Drop { .. } => true,
            Wish::Read { .. } | Wish::Flush | Wish::Id => false,
        }
    }
}

/// Bytes that are to become zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Zeros {
    offset: u64,
    bytes: u64,
    may_be_hole: bool,
}

/// The guest leaves no room for the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request without room for its status")]
pub(super) struct NoStatus;

impl From<Gone> for Status {
    fn from(_: Gone) -> Status {
        Status::Failed
    }
}

impl From<BlockError> for Status {
    fn from(_: BlockError) -> Status {
        Status::Failed
    }
}

/// A read or a write that others may be under way beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Short {
    Read { offset: u64, bytes: usize },
    Write { offset: u64, bytes: usize },
}

/// The request, if it is a short read or write that is permitted.
pub(super) fn short(drive: &Drive, memory: &Memory, chain: &Chain) -> Option<Short> {
    let status_at = chain.writable.bytes().checked_sub(1)?;
    let is_short = |bytes: u64| bytes <= flow::MAX_BYTES as u64;
    match permitted(drive, memory, chain, status_at).ok()? {
        Wish::Read { offset, bytes } if is_short(bytes) => {
            Some(Short::Read { offset, bytes: bytes as usize })
        }
        Wish::Write { offset, bytes } if is_short(bytes) => {
            Some(Short::Write { offset, bytes: bytes as usize })
        }
        _ => None,
    }
}

/// Copies what a write is to write.
pub(super) fn load(memory: &Memory, chain: &Chain, data: &mut [u8]) -> Result<(), Gone> {
    chain.readable.load(memory, HEAD_BYTES, data)
}

/// Tells the guest how a request ended. Returns how many bytes of its buffers count as written:
/// all of them, as QEMU's devices have it, also when the request fails.
pub(super) fn answer(memory: &Memory, chain: &Chain, status: Status) -> Result<u32, NoStatus> {
    let status_at = chain.writable.bytes().checked_sub(1).ok_or(NoStatus)?;
    chain.writable.store(memory, status_at, &[status as u8]).map_err(|Gone| NoStatus)?;
    Ok(u32::try_from(chain.writable.bytes()).unwrap_or(u32::MAX))
}

/// Does what is asked, and tells the guest.
pub(super) fn serve(
    drive: &Drive,
    memory: &Memory,
    chain: &Chain,
    part: &mut [u8; PART_BYTES],
) -> Result<u32, NoStatus> {
    let status_at = chain.writable.bytes().checked_sub(1).ok_or(NoStatus)?;
    let done = carry_out(drive, memory, chain, status_at, part);
    answer(memory, chain, done.err().unwrap_or(Status::Done))
}

/// The request, if it is permitted.
fn permitted(
    drive: &Drive,
    memory: &Memory,
    chain: &Chain,
    answer_bytes: u64,
) -> Result<Wish, Status> {
    let mut head = [0; HEAD_BYTES as usize];
    chain.readable.load(memory, 0, &mut head)?;
    let data_bytes = chain.readable.bytes() - HEAD_BYTES;
    let wish = wish(&head, data_bytes, answer_bytes)?;
    // The guest was told, and may not have listened.
    match drive.role == Role::Reader && wish.changes_anything() {
        true => Err(Status::Failed),
        false => Ok(wish),
    }
}

fn carry_out(
    drive: &Drive,
    memory: &Memory,
    chain: &Chain,
    answer_bytes: u64,
    part: &mut [u8; PART_BYTES],
) -> Result<(), Status> {
    let volume = &drive.volume;
    match permitted(drive, memory, chain, answer_bytes)? {
        Wish::Read { offset, bytes } => {
            for (at, length) in parts(offset, bytes) {
                let data = &mut part[..length];
                volume.read(offset + at, data).map_err(|(_, error)| error)?;
                chain.writable.store(memory, at, data)?;
            }
        }
        Wish::Write { offset, bytes } => {
            for (at, length) in parts(offset, bytes) {
                let data = &mut part[..length];
                chain.readable.load(memory, HEAD_BYTES + at, data)?;
                drive.write(offset + at, data)?;
            }
        }
        Wish::Flush => volume.flush()?,
        Wish::Id => {
            let mut id = [0; ID_BYTES];
            let name = volume.name().as_bytes();
            let length = name.len().min(ID_BYTES);
            id[..length].copy_from_slice(&name[..length]);
            let room = answer_bytes.min(ID_BYTES as u64) as usize;
            chain.writable.store(memory, 0, &id[..room])?;
        }
        Wish::Drop { is_discard, ranges } => {
            let wanted = zeros(memory, &chain.readable, is_discard, ranges)?;
            for Zeros { offset, bytes, may_be_hole } in wanted {
                match is_discard {
                    true => volume.trim(offset, bytes)?,
                    false => drive.write_zeroes(offset, bytes, !may_be_hole)?,
                }
            }
        }
    }
    Ok(())
}

/// Decodes a request's head. The volume refuses bytes beyond the drive's end.
fn wish(
    head: &[u8; HEAD_BYTES as usize],
    data_bytes: u64,
    answer_bytes: u64,
) -> Result<Wish, Status> {
    let kind = u32::from_le_bytes(head[..4].try_into().expect("four bytes"));
    let sector = u64::from_le_bytes(head[8..].try_into().expect("eight bytes"));
    let offset = || sector.checked_mul(SECTOR).ok_or(Status::Failed);
    let whole = |bytes: u64| {
        if bytes.is_multiple_of(SECTOR) { Ok(bytes) } else { Err(Status::Failed) }
    };
    match kind {
        blk::VIRTIO_BLK_T_IN => Ok(Wish::Read { offset: offset()?, bytes: whole(answer_bytes)? }),
        blk::VIRTIO_BLK_T_OUT => Ok(Wish::Write { offset: offset()?, bytes: whole(data_bytes)? }),
        blk::VIRTIO_BLK_T_FLUSH => Ok(Wish::Flush),
        blk::VIRTIO_BLK_T_GET_ID => Ok(Wish::Id),
        blk::VIRTIO_BLK_T_DISCARD | blk::VIRTIO_BLK_T_WRITE_ZEROES => {
            let ranges = data_bytes / RANGE_BYTES as u64;
            let is_whole = data_bytes.is_multiple_of(RANGE_BYTES as u64);
            if !is_whole || !(1..=u64::from(MAX_RANGES)).contains(&ranges) {
                return Err(Status::Failed);
            }
            let is_discard = kind == blk::VIRTIO_BLK_T_DISCARD;
            Ok(Wish::Drop { is_discard, ranges: ranges as usize })
        }
        _ => Err(Status::Unsupported),
    }
}

/// The ranges of a discard or a write of zeros: none is touched if one of them cannot be.
fn zeros(
    memory: &Memory,
    readable: &Buffers,
    is_discard: bool,
    ranges: usize,
) -> Result<Vec<Zeros>, Status> {
    let mut bytes = [0; MAX_RANGES as usize * RANGE_BYTES];
    let bytes = &mut bytes[..ranges * RANGE_BYTES];
    readable.load(memory, HEAD_BYTES, bytes)?;
    let (ranges, _) = bytes.as_chunks::<RANGE_BYTES>();
    ranges.iter().map(|range| zeros_of(range, is_discard)).collect()
}

fn zeros_of(range: &[u8; RANGE_BYTES], is_discard: bool) -> Result<Zeros, Status> {
    let sector = u64::from_le_bytes(range[..8].try_into().expect("eight bytes"));
    let sectors = u32::from_le_bytes(range[8..12].try_into().expect("four bytes"));
    let flags = u32::from_le_bytes(range[12..].try_into().expect("four bytes"));
    let known = if is_discard { 0 } else { blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP };
    if flags & !known != 0 {
        return Err(Status::Unsupported);
    }
    let offset = sector.checked_mul(SECTOR).ok_or(Status::Failed)?;
    if sectors > MAX_RANGE_SECTORS {
        return Err(Status::Failed);
    }
    Ok(Zeros { offset, bytes: u64::from(sectors) * SECTOR, may_be_hole: flags != 0 })
}

/// Where a request's parts begin, and how long they are. They meet where pages do, so that no page
/// is written by two of them.
fn parts(offset: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let beyond_page = (offset + at) % PAGE_SIZE as u64;
        let length = (PART_BYTES as u64 - beyond_page).min(bytes - at);
        let part = (length > 0).then_some((at, length as usize));
        at += length;
        part
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(kind: u32, sector: u64) -> [u8; 16] {
        let mut head = [0; 16];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[8..].copy_from_slice(&sector.to_le_bytes());
        head
    }

    #[test]
    fn requests_are_read_as_they_are_written() {
        let read = wish(&head(0, 3), 0, 1024);
        assert_eq!(read, Ok(Wish::Read { offset: 1536, bytes: 1024 }));
        assert_eq!(wish(&head(1, 3), 512, 0), Ok(Wish::Write { offset: 1536, bytes: 512 }));
        assert_eq!(wish(&head(4, 0), 0, 0), Ok(Wish::Flush));
        assert_eq!(wish(&head(8, 0), 0, 20), Ok(Wish::Id));
        let discard = wish(&head(11, 0), 32, 0);
        assert_eq!(discard, Ok(Wish::Drop { is_discard: true, ranges: 2 }));
        assert_eq!(wish(&head(1, 0), 511, 0), Err(Status::Failed));
        assert_eq!(wish(&head(0, u64::MAX / 2), 0, 512), Err(Status::Failed));
        assert_eq!(wish(&head(11, 0), 0, 0), Err(Status::Failed));
        assert_eq!(wish(&head(13, 0), 33 * 16, 0), Err(Status::Failed));
        assert_eq!(wish(&head(14, 0), 16, 0), Err(Status::Unsupported));
    }

    #[test]
    fn flags_that_mean_nothing_are_refused() {
        let range = |sectors: u32, flags: u32| {
            let mut range = head(7, 0);
            range[..8].copy_from_slice(&9u64.to_le_bytes());
            range[8..12].copy_from_slice(&sectors.to_le_bytes());
            range[12..].copy_from_slice(&flags.to_le_bytes());
            range
        };
        let expected = Zeros { offset: 4608, bytes: 1024, may_be_hole: true };
        assert_eq!(zeros_of(&range(2, 1), false), Ok(expected));
        assert_eq!(zeros_of(&range(2, 1), true), Err(Status::Unsupported));
        assert_eq!(zeros_of(&range(2, 2), false), Err(Status::Unsupported));
        assert_eq!(zeros_of(&range(u32::MAX, 0), true), Err(Status::Failed));
    }

    proptest! {
        #[test]
        fn parts_cover_a_request_and_share_no_page(
            sector in 0u64..1 << 40, sectors in 0u64..5000,
        ) {
            let (offset, bytes) = (sector * SECTOR, sectors * SECTOR);
            let mut end = 0;
            for (at, length) in parts(offset, bytes) {
                prop_assert_eq!(at, end);
                prop_assert!((1..=PART_BYTES).contains(&length));
                prop_assert!(at == 0 || (offset + at).is_multiple_of(PAGE_SIZE as u64));
                end = at + length as u64;
            }
            prop_assert_eq!(end, bytes);
        }
    }
}
