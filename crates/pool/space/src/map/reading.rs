//! A space that one process owns and others only read, each from the donors themselves.
//!
//! The owner says where its segments are ([`Space::segments_at`]) and has donors let the readers'
//! nodes read ([`Space::let_read`]). A reader's space ([`Space::of_another`]) asks donors for pages
//! and for nothing else: it fences nobody, renews nothing, takes and frees nothing, and what it is
//! told of replaces what it has found out. How it is told, and how long it may believe that, is its
//! user's.

use crate::config::{Directory, SpaceConfig};
use crate::control::Persistence;
use crate::map::group::{DonorIndex, Group, Place};
use crate::map::{Holding, Map, Segment};
use crate::{DonorAddress, Space, SpaceError};
use hecaton_memory::{Epoch, ExtentId, Generation};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::Request;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

/// Where one copy of a segment is that may be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberAt {
    /// The donor, by name.
    pub donor: String,
    /// The life of the donor in which the extent was given.
    pub boot: u64,
    /// The extent.
    pub extent: u64,
}

/// Where a segment may be read: nowhere, if all its copies are lost or it was given back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentAt {
    /// The segment.
    pub segment: u64,
    /// Its whole copies.
    pub members: Vec<MemberAt>,
}

impl Space {
    /// A number that rises whenever a segment's whereabouts may have changed.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Where all segments are that are anywhere, as of that number of changes.
    pub fn segments_at(&self) -> (u64, BTreeMap<u64, Vec<MemberAt>>) {
        let map = self.map();
        // It rises while the map is held.
        let changes = self.changes();
        let at = |place: Place| MemberAt {
            donor: map.donor(place.donor).name.clone(),
            boot: place.boot,
            extent: place.extent.0,
        };
        let held = map.holdings();
        let segments = held.map(|(segment, held)| (segment, held.group.whole().map(at).collect()));
        (changes, segments.collect())
    }

    /// The donors that the space knows, and where they are.
    pub fn donor_addresses(&self) -> Vec<DonorAddress> {
        let donors = self.donors.read().unwrap_or_else(PoisonError::into_inner).clone();
        let map = self.map();
        let address = |donor: &Arc<crate::control::Donor>| DonorAddress {
            name: donor.name.clone(),
            site: map.donor(donor.index).site.clone(),
            addr: donor.address(),
        };
        donors.iter().map(address).collect()
    }

    /// Has all donors let nodes read, where nodes have certificates. How many could not be told;
    /// one that is started again has to be told once more.
    pub fn let_read(&self, nodes: &[String]) -> usize {
        if self.config().credentials.is_none() {
            return 0;
        }
        let told = self.each_donor(|donor| {
            nodes.iter().all(|node| {
                let answer = self.call(donor, None, Request::Admit { node }, Persistence::Once);
                answer.is_ok_and(|answered| answered.outcome == Outcome::Done)
            })
        });
        told.iter().filter(|is_told| !**is_told).count()
    }

    /// A space that another process owns, to be read. Where its segments are is not known yet.
    pub fn of_another(
        config: SpaceConfig,
        directory: Arc<dyn Directory>,
    ) -> Result<Arc<Space>, SpaceError> {
        let epoch = AtomicU64::new(config.epoch.0);
        let map = Map::new(config.shape()).at(config.site.clone());
        let space = Space::begin(config, directory, map, false)?;
        let is_set = space.epoch_of_another.set(epoch);
        is_set.expect("the space was made just now");
        Ok(space)
    }

    /// Sets the owner's epoch of another's space. True if it is new, so that earlier lanes must go.
    pub fn set_epoch_of_another(&self, epoch: Epoch) -> bool {
        let known = self.epoch_of_another.get();
        known.is_some_and(|known| known.swap(epoch.0, Ordering::AcqRel) != epoch.0)
    }

    /// Sets where some segments of another's space are. Copies at donors that the directory does
    /// not know are left out.
    pub fn place(&self, segments: &[SegmentAt]) {
        self.ask_directory(false);
        let mut map = self.map();
        let donors: BTreeMap<String, u32> =
            (0u32..).zip(map.donors()).map(|(index, donor)| (donor.name.clone(), index)).collect();
        for SegmentAt { segment, members } in segments {
            if self.check_segment(*segment).is_err() {
                continue;
            }
            let mut group = Group::new(Generation::default());
            for MemberAt { donor, boot, extent } in members {
                let Some(index) = donors.get(donor).copied().map(DonorIndex) else { continue };
                let has_room = group.members().len() < crate::map::group::MAX_MEMBERS;
                if has_room && group.at(index).is_none() {
                    group.add(Place { donor: index, boot: *boot, extent: ExtentId(*extent) }, true);
                }
            }
            let at = match group.members() {
                [] => Segment::Lost(DonorIndex::UNKNOWN),
                _ => {
                    let since = Generation::default();
                    Segment::Held(Holding { group, degraded_since: None, pages: 0, since })
                }
            };
            map.set(*segment, Some(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Completion, Site};
    use hecaton_donor::{Donor as Lender, DonorConfig, listen};
    use hecaton_memory::{PAGE_SIZE, Size, SpaceId, page_sum};
    use std::net::SocketAddr;
    use std::time::Duration;

    struct One(SocketAddr);

    impl Directory for One {
        fn donors(&self) -> Vec<DonorAddress> {
            vec![DonorAddress { name: "d".into(), site: Site::unplaced("d"), addr: self.0 }]
        }
    }

    fn read(space: &Arc<Space>, page: u64) -> Result<Vec<u8>, SpaceError> {
        let mut lane = space.lane().unwrap();
        lane.read(1, &[page])?;
        let mut result = None;
        while result.is_none() {
            lane.progress(Some(Duration::from_secs(1)), &mut |completion| {
                result = Some(match completion {
                    Completion::Read { data, .. } => Ok(data.to_vec()),
                    Completion::Failed { error, .. } => Err(error),
                    Completion::Written { .. } => unreachable!("nothing is written"),
                });
            });
        }
        result.unwrap()
    }

    #[test]
    fn a_reader_reads_where_it_is_told_and_changes_nothing() {
        let config = DonorConfig::new("d", ([127, 0, 0, 1], 0).into(), Size(1 << 20));
        let lender = Lender::open(&config, None).unwrap();
        let serving = lender.serve(listen(config.listen).unwrap()).unwrap();
        let directory = Arc::new(One(serving.address()));
        let mut config = SpaceConfig::new(SpaceId(7), Epoch(1), "test", 64);
        config.segment_order = 4;
        config.patience = Duration::from_millis(500);
        let owner = Space::create(config.clone(), directory.clone()).unwrap();
        let (contents, before) = (vec![7; PAGE_SIZE], owner.changes());
        let mut lane = owner.lane().unwrap();
        lane.write(1, &[17], &[page_sum(&contents)], &[&contents]).unwrap();
        let mut is_written = false;
        while !is_written {
            lane.progress(Some(Duration::from_secs(1)), &mut |completion| {
                is_written = matches!(completion, Completion::Written { .. });
            });
        }
        let (changes, segments) = owner.segments_at();
        assert!(changes > before && segments.keys().eq([&1]), "{segments:?}");
        let at = |epoch: u64| {
            let config = SpaceConfig { epoch: Epoch(epoch), ..config.clone() };
            Space::of_another(config, directory.clone()).unwrap()
        };
        let reader = at(1);
        assert_eq!(read(&reader, 17).unwrap(), vec![0; PAGE_SIZE], "it was told of nothing");
        let told: Vec<_> =
            segments.into_iter().map(|(segment, members)| SegmentAt { segment, members }).collect();
        reader.place(&told);
        assert_eq!(read(&reader, 17).unwrap(), contents);

        // The owner's next process is not hindered, and fences the reader until it is told.
        let expected =
            BTreeMap::from([(1, crate::Expected { pages: 1, generation: Generation::default() })]);
        let next = SpaceConfig { epoch: Epoch(2), ..config.clone() };
        let next = Space::adopt(next, directory.clone(), &expected).unwrap();
        assert!(read(&reader, 17).is_err());
        assert!(!reader.is_fenced() && !next.is_fenced());
        assert!(reader.set_epoch_of_another(Epoch(2)) && !reader.set_epoch_of_another(Epoch(2)));
        assert_eq!(read(&reader, 17).unwrap(), contents);

        // Given back: the reader is told, or finds it gone.
        next.free_segment(1).unwrap();
        assert!(matches!(read(&reader, 17), Err(SpaceError::Lost { .. })));
        reader.place(&[SegmentAt { segment: 1, members: Vec::new() }]);
        assert!(matches!(read(&reader, 17), Err(SpaceError::Lost { .. })));
        let snapshot = lender.snapshot();
        assert_eq!(snapshot.free_pages, snapshot.pages, "nothing else was taken");
    }
}
