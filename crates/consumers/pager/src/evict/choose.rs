//! Chooses the pages that are to leave.

use crate::core::Core;
use crate::programs::address_space::AddressSpace;
use crate::state::entry::Place;
use crate::state::tables::Key;

impl Core {
    /// Chooses at most `most` pages by the eviction order, which are sorted and busy then.
    pub(crate) fn choose(
        &mut self,
        most: usize,
        may_go: impl Fn(&[Option<AddressSpace>], Key) -> bool,
    ) -> Vec<Key> {
        let mut places = Vec::with_capacity(most);
        let (tables, state, spaces) = (&mut self.tables, &self.state, &self.spaces);
        let mut still = |place: u32| {
            let Some(key) = tables.key_at(state, place) else { return false };
            let entry = tables.get(state, key);
            let is_free = entry.place() == Place::Resident && !entry.is_busy();
            let evictable = is_free && may_go(spaces, key);
            if evictable {
                tables.set(state, key, entry.with_busy(true));
            }
            evictable
        };
        self.order.victims(most, &mut still, &mut places);
        let key_at = |&place: &u32| self.tables.key_at(&self.state, place);
        let mut keys: Vec<Key> = places.iter().filter_map(key_at).collect();
        keys.sort_unstable();
        keys
    }
}
