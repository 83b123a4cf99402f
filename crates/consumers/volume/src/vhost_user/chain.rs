//! The buffers of a request, as the guest's descriptors name them.
//!
//! `virtio-queue` has an iterator over them too. It ends without a word at a descriptor that cannot
//! be, and begins with an entry of the ring only; a request that a predecessor had under way is
//! known by its head alone.

use super::Memory;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address as _, Bytes as _, GuestAddress, GuestMemory as _, Permissions};

/// Most descriptors of a request, and most entries of a queue.
pub(super) const MAX_DESCRIPTORS: u16 = 1024;

const DESCRIPTOR_BYTES: u32 = size_of::<Descriptor>() as u32;

/// The buffers of one request.
#[derive(Debug)]
pub(super) struct Chain {
    /// Buffers with the guest's request.
    pub(super) readable: Buffers,
    /// Where it wants its answer.
    pub(super) writable: Buffers,
}

/// Pieces of the guest's memory, one after another.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    pieces: Vec<(GuestAddress, u32)>,
    bytes: u64,
}

/// Error in a request's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("descriptor {index} of a table of {entries}")]
    Index { index: u16, entries: u16 },
    #[error("a chain of more descriptors than its table has")]
    Endless,
    #[error("{bytes} bytes at {address:#x} are not all in the guest's memory")]
    Outside { address: u64, bytes: u32 },
    #[error("an indirect table of {0} bytes")]
    Table(u32),
    #[error("an indirect table within another, or with a next descriptor")]
    Nested,
    #[error("a buffer to be read behind one to be written")]
    Order,
}

impl Chain {
    /// Reads the chain that begins at `head`. Every buffer is in the guest's memory as it is now.
    pub(super) fn read(
        memory: &Memory,
        table: GuestAddress,
        entries: u16,
        head: u16,
    ) -> Result<Chain, Malformed> {
        let mut chain = Chain { readable: Buffers::default(), writable: Buffers::default() };
        let (mut table, mut entries, mut index) = (table, entries, head);
        let mut is_indirect = false;
        let mut left = entries;
        loop {
            if index >= entries {
                return Err(Malformed::Index { index, entries });
            }
            left = left.checked_sub(1).ok_or(Malformed::Endless)?;
            let outside = Malformed::Outside { address: table.0, bytes: DESCRIPTOR_BYTES };
            let offset = u64::from(index) * u64::from(DESCRIPTOR_BYTES);
            let address = table.checked_add(offset).ok_or(outside)?;
            let descriptor: Descriptor = memory.read_obj(address).map_err(|_| outside)?;
            if descriptor.refers_to_indirect_table() {
                if is_indirect || descriptor.has_next() {
                    return Err(Malformed::Nested);
                }
                let bytes = descriptor.len();
                let is_whole = bytes.is_multiple_of(DESCRIPTOR_BYTES);
                let count = bytes / DESCRIPTOR_BYTES;
                if !is_whole || !(1..=u32::from(MAX_DESCRIPTORS)).contains(&count) {
                    return Err(Malformed::Table(bytes));
                }
                is_indirect = true;
                (table, entries, index) = (descriptor.addr(), count as u16, 0);
                left = entries;
                continue;
            }
            chain.add(memory, &descriptor)?;
            if !descriptor.has_next() {
                return Ok(chain);
            }
            index = descriptor.next();
        }
    }

    fn add(&mut self, memory: &Memory, descriptor: &Descriptor) -> Result<(), Malformed> {
        let (address, bytes) = (descriptor.addr(), descriptor.len());
        let (buffers, access) = if descriptor.is_write_only() {
            (&mut self.writable, Permissions::Write)
        } else if self.writable.pieces.is_empty() {
            (&mut self.readable, Permissions::Read)
        } else {
            return Err(Malformed::Order);
        };
        if bytes == 0 || !memory.check_range(address, bytes as usize, access) {
            return Err(Malformed::Outside { address: address.0, bytes });
        }
        buffers.pieces.push((address, bytes));
        buffers.bytes += u64::from(bytes);
        Ok(())
    }
}

/// The buffers are shorter, or have left the guest's memory since they were checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the guest's buffers are not there")]
pub(super) struct Gone;

impl Buffers {
    /// Bytes of all pieces.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies from them, beginning at a byte of theirs.
    pub(super) fn load(&self, memory: &Memory, from: u64, to: &mut [u8]) -> Result<(), Gone> {
        let bytes = to.len();
        self.each(from, bytes, |address, part| {
            memory.read_slice(&mut to[part], address).map_err(|_| Gone)
        })
    }

    /// Copies to them, beginning at a byte of theirs.
    pub(super) fn store(&self, memory: &Memory, from: u64, data: &[u8]) -> Result<(), Gone> {
        self.each(from, data.len(), |address, part| {
            memory.write_slice(&data[part], address).map_err(|_| Gone)
        })
    }

    fn each(
        &self,
        from: u64,
        bytes: usize,
        mut copy: impl FnMut(GuestAddress, std::ops::Range<usize>) -> Result<(), Gone>,
    ) -> Result<(), Gone> {
        let (mut skipped, mut done) = (from, 0);
        for (address, length) in &self.pieces {
            if done == bytes {
                break;
            }
            let length = u64::from(*length);
            if skipped >= length {
                skipped -= length;
                continue;
            }
            let now = (length - skipped).min((bytes - done) as u64) as usize;
            copy(address.checked_add(skipped).ok_or(Gone)?, done..done + now)?;
            skipped = 0;
            done += now;
        }
        if done == bytes { Ok(()) } else { Err(Gone) }
    }
}
