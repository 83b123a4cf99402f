//! Describes a drive to its guest: features and configuration space.

use super::chain::MAX_DESCRIPTORS;
use crate::attach::Role;
use hecaton_memory::PAGE_SIZE;
use vhost::vhost_user::{VhostUserProtocolFeatures, VhostUserVirtioFeatures};
use virtio_bindings::{virtio_blk as blk, virtio_config, virtio_ring};

/// Most queues of a device. A monitor gives a guest one for each of its processors.
pub(super) const MAX_QUEUES: u16 = 64;

/// The unit of offsets and lengths.
pub(super) const SECTOR: u64 = 512;

/// Most ranges of one discard, or of one write of zeros.
pub(super) const MAX_RANGES: u32 = 32;

/// Longest range of a discard, and of a write of zeros: 1 GiB.
pub(super) const MAX_RANGE_SECTORS: u32 = (1 << 30) / SECTOR as u32;

/// Data buffers of a request: the usual length of a queue, less the request's head and status.
const MAX_SEGMENTS: u32 = 126;

/// Longest request that a guest is advised to make, in sectors: 1 MiB.
const OPTIMAL_SECTORS: u32 = (1 << 20) / SECTOR as u32;

const SECTORS_OF_A_PAGE: u64 = PAGE_SIZE as u64 / SECTOR;

/// Features of a drive that the guest may write.
pub(super) const FEATURES: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1
    | 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC
    | EVENT_IDX
    | 1 << blk::VIRTIO_BLK_F_SEG_MAX
    | 1 << blk::VIRTIO_BLK_F_BLK_SIZE
    | 1 << blk::VIRTIO_BLK_F_TOPOLOGY
    | FLUSH
    | 1 << blk::VIRTIO_BLK_F_MQ
    | DROPPING
    | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// The guest can flush its writes.
pub(super) const FLUSH: u64 = 1 << blk::VIRTIO_BLK_F_FLUSH;

const DROPPING: u64 = 1 << blk::VIRTIO_BLK_F_DISCARD | 1 << blk::VIRTIO_BLK_F_WRITE_ZEROES;

/// Features of a drive, by the access that the guest has.
pub(super) const fn features(role: Role) -> u64 {
    match role {
        Role::Writer => FEATURES,
        Role::Reader => FEATURES & !DROPPING | 1 << blk::VIRTIO_BLK_F_RO,
    }
}

/// Each side names the ring entry at which it wants to be notified.
pub(super) const EVENT_IDX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;

/// Features of the vhost-user protocol that a monitor may use.
pub(super) const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::BACKEND_REQ)
    .union(VhostUserProtocolFeatures::INFLIGHT_SHMFD);

/// Configuration space of a drive of `bytes` bytes (virtio 1.2, section 5.2.4).
pub(super) fn space(bytes: u64) -> Vec<u8> {
    let mut space = Vec::with_capacity(60);
    space.extend((bytes / SECTOR).to_le_bytes());
    // No bound on the length of a buffer.
    space.extend([0; 4]);
    space.extend(MAX_SEGMENTS.to_le_bytes());
    // No cylinders, heads and sectors.
    space.extend([0; 4]);
    space.extend((SECTOR as u32).to_le_bytes());
    // Requests of whole pages cost least: eight blocks each, the first one at offset 0.
    space.extend([SECTORS_OF_A_PAGE.trailing_zeros() as u8, 0]);
    space.extend((SECTORS_OF_A_PAGE as u16).to_le_bytes());
    space.extend(OPTIMAL_SECTORS.to_le_bytes());
    // A byte for the write cache, which cannot be turned off, and an unused byte.
    space.extend([0; 2]);
    space.extend(MAX_QUEUES.to_le_bytes());
    space.extend(MAX_RANGE_SECTORS.to_le_bytes());
    space.extend(MAX_RANGES.to_le_bytes());
    space.extend((SECTORS_OF_A_PAGE as u32).to_le_bytes());
    space.extend(MAX_RANGE_SECTORS.to_le_bytes());
    space.extend(MAX_RANGES.to_le_bytes());
    // Zeros may become holes; then three unused bytes.
    space.extend([1, 0, 0, 0]);
    space
}

const _: () = assert!(MAX_SEGMENTS + 2 <= MAX_DESCRIPTORS as u32);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn every_field_is_where_the_kernel_has_it() {
        let space = space((5 << 30) + 4096);
        let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().unwrap());
        assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), (5 << 21) + 8);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, seg_max)), 126);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, blk_size)), 512);
        assert_eq!(space[offset_of!(blk::virtio_blk_config, physical_block_exp)], 3);
        assert_eq!(space[offset_of!(blk::virtio_blk_config, min_io_size)], 8);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, opt_io_size)), 2048);
        assert_eq!(space[offset_of!(blk::virtio_blk_config, num_queues)], 64);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, max_discard_sectors)), 1 << 21);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, max_discard_seg)), 32);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, discard_sector_alignment)), 8);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, max_write_zeroes_sectors)), 1 << 21);
        assert_eq!(word(offset_of!(blk::virtio_blk_config, max_write_zeroes_seg)), 32);
        assert_eq!(space[offset_of!(blk::virtio_blk_config, write_zeroes_may_unmap)], 1);
        assert_eq!(space.len(), offset_of!(blk::virtio_blk_config, unused1) + 3);
    }
}
