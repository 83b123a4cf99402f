//! Which of the donor's pages are free: an allocator for each zone.

use hecaton_memory::buddy::Buddy;

/// A run of the donor's pages that lies on one NUMA node. Zones follow one another from page 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// How many pages.
    pub pages: u64,
    /// The NUMA node, where the host has several.
    pub node: Option<u32>,
}

/// The zones' allocators. Pages are told by their numbers in the whole of the donor's memory.
#[derive(Debug)]
pub(super) struct FreePages {
    zones: Vec<ZonePages>,
}

#[derive(Debug)]
struct ZonePages {
    first_page: u64,
    node: Option<u32>,
    buddy: Buddy,
}

impl FreePages {
    /// All of them are free.
    pub(super) fn new(zones: &[Zone]) -> FreePages {
        let mut first_page = 0;
        let zones = zones.iter().map(|zone| {
            let buddy = Buddy::new(zone.pages);
            let zone = ZonePages { first_page, node: zone.node, buddy };
            first_page += zone.buddy.pages();
            zone
        });
        FreePages { zones: zones.collect() }
    }

    /// Takes a run from the zone that has the most free pages, so that the nodes' memory
    /// controllers share the load.
    pub(super) fn take(&mut self, order: u8) -> Option<u64> {
        let fits = |zone: &&mut ZonePages| zone.buddy.largest_free_order() >= Some(order);
        let zone = self.zones.iter_mut().filter(fits).max_by_key(|zone| zone.buddy.free_pages())?;
        zone.buddy.allocate(order).map(|first| zone.first_page + first)
    }

    /// Takes this very run; `None` if it is not free.
    pub(super) fn take_at(&mut self, first_page: u64, order: u8) -> Option<()> {
        let zone = self.zone_of(first_page)?;
        zone.buddy.reserve(first_page - zone.first_page, order).ok()
    }

    /// The run is free again.
    ///
    /// # Panics
    /// If it was not taken.
    pub(super) fn give_back(&mut self, first_page: u64, order: u8) {
        let zone = self.zone_of(first_page).expect("what was taken lies in a zone");
        zone.buddy.free(first_page - zone.first_page, order).expect("it was taken");
    }

    /// How many are free.
    pub(super) fn count(&self) -> u64 {
        self.zones.iter().map(|zone| zone.buddy.free_pages()).sum()
    }

    /// The zones, and how many pages of each are free.
    pub(super) fn zones(&self) -> impl Iterator<Item = (Zone, u64)> {
        self.zones.iter().map(|zone| {
            (Zone { pages: zone.buddy.pages(), node: zone.node }, zone.buddy.free_pages())
        })
    }

    fn zone_of(&mut self, page: u64) -> Option<&mut ZonePages> {
        self.zones.iter_mut().rfind(|zone| zone.first_page <= page)
    }
}
