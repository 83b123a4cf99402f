//! Issues and revokes a cluster's certificates, and does mutual TLS with them.
//!
//! A certificate names one party and its role in its subject: `CN=name, OU=role`. The manager, or
//! another server, decides what a role allows. Here the role only decides who passes for a manager,
//! and who for a server of volumes. Only their certificates are valid for servers, and they are
//! valid for nothing else. Clients of a manager also check the role. So no party can pose as the
//! manager of others, and a server's key gives no orders.
//!
//! A host that is to become a node can also get its certificate over the network, with a token.
//!
//! TLS 1.3 is the only version: both ends are Hecaton's own, except clients of volumes, which
//! support it.

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
