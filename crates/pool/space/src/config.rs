//! Defines the configuration of a space and the directory of its donors.

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
    /// One extent holds a segment; if its donor is lost, the segment is lost.
    #[default]
    None,
    /// This many extents, 2 or 3, hold a segment, at different donors. They are on different hosts
    /// where the cluster has several.
    Mirror(u8),
}

impl Redundancy {
    /// Redundancy with this many copies of each page; an error unless 1 to 3.
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

/// How the space keeps cold segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cold {
    /// The erasure code.
    pub code: Code,
    /// How long all segments of a stripe must be untouched before they are coded.
    pub after: Duration,
}

/// Configuration of a space.
#[derive(Clone, Debug)]
pub struct SpaceConfig {
    /// The space's name on the wire, chosen at random.
    pub id: SpaceId,
    /// The borrower's epoch. Donors refuse borrowers with an older epoch.
    pub epoch: Epoch,
    /// The consumer's name, for people.
    pub consumer: String,
    /// Pages in the space.
    pub pages: u64,
    /// Pages in a segment, as a power of two: 12 for 16 MiB.
    pub segment_order: u8,
    /// How groups survive the loss of a donor.
    pub redundancy: Redundancy,
    /// Erasure coding of cold segments. Only with copies.
    pub cold: Option<Cold>,
    /// The borrower's location: nearer donors are preferred.
    pub site: Site,
    /// How long donors keep the space's extents without hearing from it.
    pub lease: Duration,
    /// How long a request is retried at a donor that does not answer before the request fails.
    pub patience: Duration,
    /// How long a donor may be silent before requests fail over to donors with the same pages. Only
    /// with copies.
    pub failover: Duration,
    /// How long a donor may leave all page requests unanswered before it counts as lost. Requests
    /// that wait for its pages then fail for good. At least the patience applies.
    pub give_up: Duration,
    /// Bounds of each connection.
    pub connection: Options,
    /// Credentials presented to donors, which must then present certificates of their nodes.
    /// `None`: connections are not protected.
    pub credentials: Option<Arc<CredentialsDir>>,
}

/// Default of [`SpaceConfig::failover`]: long enough for a busy host to answer, short enough that a
/// program hardly stalls.
pub const FAILOVER: Duration = Duration::from_millis(150);

impl SpaceConfig {
    /// The default order of a segment: 16 MiB, large enough that the map of a 1 TiB space fits in
    /// 1.5 MiB, small enough that a program of 256 MiB spreads over its donors.
    pub const SEGMENT_ORDER: u8 = 12;

    /// The highest order of a segment: 4 GiB.
    pub const MAX_SEGMENT_ORDER: u8 = 20;

    /// A space with the defaults: no redundancy, a lease of 30 s, a patience of 10 s, a failover
    /// after 150 ms, donors given up after 60 s.
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

    /// The shape of the space, for its map.
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
    /// The donor's name. It identifies the donor after a change of address.
    pub name: String,
    /// The donor's location.
    pub site: Site,
    /// Address at which the donor accepts page connections.
    pub addr: SocketAddr,
}

/// Lists the current donors. A space asks when it begins, when no room is left, and at each renewal
/// of its leases.
pub trait Directory: Send + Sync {
    /// All donors that the space may use.
    fn donors(&self) -> Vec<DonorAddress>;
}
