//! The extents that hold one segment, one for each copy.
//!
//! A member is *whole* when it has everything that was acknowledged, and may be read. One that has
//! joined since, to replace another or to let another go, gets all writes from then on but is read
//! only once it was filled from a whole one.
//!
//! Whenever a member leaves, the group's generation rises, and the next write brings it to those
//! that stay. A member that missed a write thus has a lower one than those that did not, which is
//! how a successor of the borrower tells them apart.
//!
//! A group that is part of a coded stripe ([`stripe`](crate::stripe)) has one member, and may be
//! left without any: its pages follow from the rest of the stripe.

use hecaton_memory::{ExtentId, Generation};

/// Most members of a group: three copies, and one that is to take the place of another.
pub const MAX_MEMBERS: usize = 4;

/// Most copies of a segment.
pub const MAX_COPIES: u8 = MAX_MEMBERS as u8 - 1;

/// A donor, by the order in which the space came to know it. Stays its for the space's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DonorIndex(pub u32);

impl DonorIndex {
    /// Stands for a donor of which only the loss is known.
    pub const UNKNOWN: DonorIndex = DonorIndex(u32::MAX);
}

/// Where a member of a segment's group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The donor.
    pub donor: DonorIndex,
    /// The life of the donor in which the extent was given.
    pub boot: u64,
    /// The extent.
    pub extent: ExtentId,
}

/// A member of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Where it is.
    pub place: Place,
    /// Whether it has everything that was acknowledged.
    pub is_whole: bool,
}

/// State of the stripe that a group is part of, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Form {
    /// No stripe: the members are copies, and are written to.
    #[default]
    Copies,
    /// A stripe whose parities are being made. A write cancels that.
    Coding,
    /// A coded stripe. It is not written to. A shard without a whole member is decoded from the
    /// rest.
    Coded,
}

/// The extents of one segment. No two are at one donor.
#[derive(Clone, Copy)]
pub struct Group {
    /// Generation that writes bring to the members.
    pub generation: Generation,
    /// State of its stripe.
    pub form: Form,
    members: [Member; MAX_MEMBERS],
    count: u8,
}

const NO_MEMBER: Member = Member {
    place: Place { donor: DonorIndex::UNKNOWN, boot: 0, extent: ExtentId(0) },
    is_whole: false,
};

impl Group {
    /// A group without members.
    pub fn new(generation: Generation) -> Group {
        Group { generation, form: Form::Copies, members: [NO_MEMBER; MAX_MEMBERS], count: 0 }
    }

    /// All members.
    pub fn members(&self) -> &[Member] {
        &self.members[..usize::from(self.count)]
    }

    /// Where it may be read.
    pub fn whole(&self) -> impl Iterator<Item = Place> + '_ {
        self.members().iter().filter(|member| member.is_whole).map(|member| member.place)
    }

    /// Whether it has this member.
    pub fn contains(&self, place: Place) -> bool {
        self.members().iter().any(|member| member.place == place)
    }

    /// The member at a donor.
    pub fn at(&self, donor: DonorIndex) -> Option<Member> {
        self.members().iter().copied().find(|member| member.place.donor == donor)
    }

    /// Adds a member.
    ///
    /// # Panics
    /// If there are [`MAX_MEMBERS`] already, or one at the same donor.
    pub fn add(&mut self, place: Place, is_whole: bool) {
        assert!(self.at(place.donor).is_none(), "two members at one donor");
        self.members[usize::from(self.count)] = Member { place, is_whole };
        self.count += 1;
    }

    /// Takes a member out, if it is there.
    pub fn remove(&mut self, place: Place) {
        if let Some(at) = self.members().iter().position(|member| member.place == place) {
            self.count -= 1;
            self.members[at..=usize::from(self.count)].rotate_left(1);
            self.members[usize::from(self.count)] = NO_MEMBER;
        }
    }

    /// The member may be read from now on.
    pub fn complete(&mut self, place: Place) {
        let count = usize::from(self.count);
        if let Some(member) = self.members[..count].iter_mut().find(|m| m.place == place) {
            member.is_whole = true;
        }
    }
}

impl PartialEq for Group {
    fn eq(&self, other: &Group) -> bool {
        self.generation == other.generation
            && self.form == other.form
            && self.members() == other.members()
    }
}

impl Eq for Group {}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Group({}, {:?}, {:?})", self.generation, self.form, self.members())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(donor: u32) -> Place {
        Place { donor: DonorIndex(donor), boot: 1, extent: ExtentId(donor.into()) }
    }

    #[test]
    fn members_come_and_go_in_order() {
        let mut group = Group::new(Generation(1));
        (0..4).for_each(|donor| group.add(place(donor), donor % 2 == 0));
        assert_eq!(group.whole().collect::<Vec<_>>(), [place(0), place(2)]);
        group.remove(place(1));
        group.remove(place(9));
        let donors: Vec<_> = group.members().iter().map(|m| m.place.donor.0).collect();
        assert_eq!(donors, [0, 2, 3]);
        group.complete(place(3));
        assert!(group.at(DonorIndex(3)).is_some_and(|member| member.is_whole));
        assert!(group.contains(place(3)) && !group.contains(place(1)));
        group.remove(place(3));
        group.remove(place(0));
        assert_eq!(group.members().len(), 1);
    }
}
