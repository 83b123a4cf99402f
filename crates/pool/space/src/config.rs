//! What a space is made of, and where its donors are.

use crate::SpaceError;
use crate::coded::code::Code;
use crate::map::Shape;
use crate::map::group::MAX_COPIES;
use hecaton_memory::{Epoch, PAGE_SIZE, SpaceId};
use hecaton_policy::site::Site;
use hecaton_transport::client::Options;
use hecaton_transport::tls::CredentialsDir;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// How a space's pages survive the loss of a donor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Redundancy {
    /// One extent holds a segment; with its donor the segment is lost.
    #[default]
    None,
    /// So many extents hold a segment, at different donors and, where there are several, on different
    /// hosts: 2 or 3.
    Mirror(u8),
}

impl Redundancy {
    /// For so many copies of each page.
    pub fn of_copies(copies: u8) -> Result<Redundancy, SpaceError> {
        match copies {
            1 => Ok(Redundancy::None),
            2..=MAX_COPIES => Ok(Redundancy::Mirror(copies)),
            _ => Err(SpaceError::Copies { copies, most: MAX_COPIES }),
        }
    }

    /// Extents in a group.
    pub fn copies(self) -> u8 {
        match self {
            Redundancy::None => 1,
            Redundancy::Mirror(copies) => copies,
        }
    }
}

/// How segments are kept that nobody has touched for long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cold {
    /// The erasure code.
    pub code: Code,
    /// For how long all segments of a stripe must have been left alone.
    pub after: Duration,
}

/// What a space is made of.
#[derive(Clone, Debug)]
pub struct SpaceConfig {
    /// The space's name on the wire, chosen at random.
    pub id: SpaceId,
    /// The borrower's epoch. Donors refuse whoever comes with an older one.
    pub epoch: Epoch,
    /// The consumer's name, for people.
    pub consumer: String,
    /// Pages in the space.
    pub pages: u64,
    /// Pages in a segment, as a power of two: 12 for 16 MiB.
    pub segment_order: u8,
    /// How groups survive the loss of a donor.
    pub redundancy: Redundancy,
    /// What is coded, when it has gone cold. Only where there are copies.
    pub cold: Option<Cold>,
    /// Where the borrower is: nearer donors are taken first.
    pub site: Site,
    /// How long donors keep the space's extents without hearing from it.
    pub lease: Duration,
    /// How long a request is tried again on a donor that does not answer before it fails.
    pub patience: Duration,
    /// How long a donor may be silent before others that have the same pages take its place. Only
    /// where there are copies.
    pub failover: Duration,
    /// How long a donor may leave all requests for its pages unanswered before it is taken for gone,
    /// and what waits for them fails for good. At least the patience counts.
    pub give_up: Duration,
    /// Bounds of each connection.
    pub connection: Options,
    /// What is shown to donors, which are then to show certificates of their nodes; connections are not
    /// protected if nothing is said.
    pub credentials: Option<Arc<CredentialsDir>>,
}

/// How long a donor may be silent before others take its place, if nothing is said: long enough for
/// a host that is busy, short enough that a program hardly stands still.
pub const FAILOVER: Duration = Duration::from_millis(150);

impl SpaceConfig {
    /// The default order of a segment: 16 MiB, large enough that the map of a 1 TiB space fits in
    /// 1.5 MiB, small enough that a program of 256 MiB spreads over its donors.
    pub const SEGMENT_ORDER: u8 = 12;

    /// The highest order of a segment: 4 GiB.
    pub const MAX_SEGMENT_ORDER: u8 = 20;

    /// A space with the defaults: no redundancy, a lease of 30 s, a patience of 10 s, donors
    /// given up after 60 s, replaced by others after 150 ms.
    pub fn new(id: SpaceId, epoch: Epoch, consumer: &str, pages: u64) -> SpaceConfig {
        SpaceConfig {
            id,
            epoch,
            consumer: consumer.to_owned(),
            pages,
            segment_order: Self::SEGMENT_ORDER,
            redundancy: Redundancy::None,
            cold: None,
            site: Site::default(),
            lease: Duration::from_secs(30),
            patience: Duration::from_secs(10),
            failover: FAILOVER,
            give_up: Duration::from_secs(60),
            connection: Options::default(),
            credentials: None,
        }
    }

    /// Pages in a segment.
    pub fn segment_pages(&self) -> u64 {
        1 << self.segment_order
    }

    /// Segments in the space; the last one may reach beyond the space's end.
    pub fn segments(&self) -> u64 {
        self.pages.div_ceil(self.segment_pages())
    }

    /// As its map needs to know it.
    pub fn shape(&self) -> Shape {
        Shape {
            segments: self.segments(),
            segment_pages: self.segment_pages(),
            copies: self.redundancy.copies(),
            epoch: self.epoch,
            code: self.cold.map(|cold| cold.code),
        }
    }

    pub(crate) fn check(&self) -> Result<(), SpaceError> {
        if self.segment_order > Self::MAX_SEGMENT_ORDER {
            return Err(SpaceError::SegmentOrder {
                order: self.segment_order,
                most: Self::MAX_SEGMENT_ORDER,
            });
        }
        if Redundancy::of_copies(self.redundancy.copies())? != self.redundancy {
            return Err(SpaceError::Copies { copies: 1, most: MAX_COPIES });
        }
        if let (Some(cold), Redundancy::None) = (self.cold, self.redundancy) {
            return Err(SpaceError::CodeOfOneCopy(cold.code));
        }
        let most = u64::MAX / PAGE_SIZE as u64;
        if self.pages == 0 || self.pages > most {
            return Err(SpaceError::Pages { pages: self.pages, most });
        }
        Ok(())
    }
}

/// A donor and where it listens.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DonorAddress {
    /// The donor's name, by which it is known again when its address changes.
    pub name: String,
    /// Where it is.
    pub site: Site,
    /// Where it takes page connections.
    pub addr: SocketAddr,
}

/// Who the donors are at this moment. Asked when a space begins, when there is no room left, and
/// with each renewal.
pub trait Directory: Send + Sync {
    /// All donors that the space may use.
    fn donors(&self) -> Vec<DonorAddress>;
}
