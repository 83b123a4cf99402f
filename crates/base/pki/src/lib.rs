//! Who may do what in a cluster, as certificates say it: an authority that issues and revokes them, and
//! mutual TLS with them.
//!
//! A certificate names one party and its role in its subject: `CN=name, OU=role`. What a role allows is the
//! manager's to decide, or whoever serves; here it only decides who can be taken for a manager, and for one
//! that serves volumes: their certificates alone are good for servers, and good for nothing else, and whoever
//! asks a manager looks at the role as well. So nobody can pose as the manager of others, and the key of a
//! server gives no orders.
//!
//! A host that is to become a node can also get its certificate over the network, with a token.
//!
//! TLS 1.3 is the only version spoken: both ends are Hecaton's own, but for clients of volumes, which know it.

mod authority;
mod connector;
mod grants;
mod identity;
mod joining;
#[cfg(feature = "testing")]
pub mod testing;
mod token;
mod trust;

pub use authority::{Authority, AuthorityError, Issued, TokenWish, Wish};
pub use connector::{ClientTls, LastingAgent, agent};
pub use grants::GrantError;
pub use identity::{Identity, IdentityError, Role};
pub use joining::{JoinError, Reception, join};
pub use token::{NoToken, Token, is_host_and_port};
pub use trust::credentials::{Credentials, CredentialsDir, CredentialsError, Loaded};
pub use trust::outside::OutsideCredentials;
