//! Decides which calls a role allows: pure, with all routes in one table.

use axum::http::Method;
use hecaton_pki::{Identity, Role};

/// A call to the manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// See nodes, donors and consumers, with the ids of their spaces.
    Look,
    /// See which donors exist.
    Directory,
    /// Make nodes or donors do something.
    Order,
    /// Act as this node.
    Be(&'a str),
}

/// Reason why a call is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Forbidden {
    /// The role does not allow the call.
    #[error("{who} may not {what}: that takes a certificate of the role {roles}")]
    Role {
        /// Caller.
        who: String,
        /// Action that the caller asked for.
        what: &'static str,
        /// Roles that allow the action.
        roles: &'static str,
    },
    /// A node speaks for another.
    #[error("{who} may not speak for node `{node}`: a node needs a certificate of its own name")]
    OtherNode {
        /// Caller.
        who: String,
        /// Name of the node that the caller claims to be.
        node: String,
    },
}

/// Purpose of a route, for every name in its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// [`Call::Look`].
    Look,
    /// [`Call::Directory`].
    Directory,
    /// [`Call::Order`].
    Order,
    /// [`Call::Be`], with the name in the path.
    Be,
}

/// All routes with their methods. No other request is answered. `openapi.json` has each route.
pub const ROUTES: &[(&str, &[&str], Purpose)] = &[
    ("/v1/status", &["GET"], Purpose::Look),
    ("/v1/overview", &["GET"], Purpose::Look),
    ("/v1/history", &["GET"], Purpose::Look),
    ("/v1/events", &["GET"], Purpose::Look),
    ("/metrics", &["GET"], Purpose::Look),
    ("/", &["GET"], Purpose::Look),
    ("/dashboard/{name}", &["GET"], Purpose::Look),
    // The description of the API is no secret.
    ("/api/openapi.json", &["GET"], Purpose::Directory),
    ("/v1/donors", &["GET"], Purpose::Directory),
    ("/v1/donors/{name}/drain", &["POST", "DELETE"], Purpose::Order),
    ("/v1/donors/{name}/limit", &["PUT", "DELETE"], Purpose::Order),
    ("/v1/nodes/{name}/remove", &["POST"], Purpose::Order),
    // `/v1/status` shows the policy.
    ("/v1/policy", &["PUT", "DELETE"], Purpose::Order),
    ("/v1/harvest-quota", &["PUT", "DELETE"], Purpose::Order),
    ("/v1/nodes/{name}/heartbeat", &["POST"], Purpose::Be),
    ("/v1/nodes/{name}", &["DELETE"], Purpose::Be),
];

/// Call of a request, by its method, its route, and the name in its path. `None`: the table has no
/// such route and method, so no role may make the request.
pub fn call_of<'a>(method: &Method, route: &str, name: &'a str) -> Option<Call<'a>> {
    let method = if method == Method::HEAD { "GET" } else { method.as_str() };
    let (_, methods, purpose) = ROUTES.iter().find(|(known, ..)| *known == route)?;
    methods.contains(&method).then_some(match purpose {
        Purpose::Look => Call::Look,
        Purpose::Directory => Call::Directory,
        Purpose::Order => Call::Order,
        Purpose::Be => Call::Be(name),
    })
}

/// Checks that `who` may make the call.
pub fn check(who: &Identity, call: Call<'_>) -> Result<(), Forbidden> {
    let (what, roles) = match (call, who.role) {
        (Call::Look, Role::Admin | Role::ReadOnly) => return Ok(()),
        (Call::Look, _) => ("see the cluster", "read-only or admin"),
        (Call::Directory, Role::Admin | Role::ReadOnly | Role::Node) => return Ok(()),
        (Call::Directory, _) => ("see the donors", "node, read-only or admin"),
        (Call::Order, Role::Admin) => return Ok(()),
        (Call::Order, _) => ("give orders", "admin"),
        (Call::Be(name), Role::Node) if name == who.name => return Ok(()),
        (Call::Be(name), Role::Node) => {
            return Err(Forbidden::OtherNode { who: who.to_string(), node: name.to_owned() });
        }
        (Call::Be(_), _) => ("be a node", "node"),
    };
    Err(Forbidden::Role { who: who.to_string(), what, roles })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_may_do_what_it_is_for() {
        let calls = [Call::Look, Call::Directory, Call::Order, Call::Be("a"), Call::Be("b")];
        for (role, may) in [
            (Role::Manager, [false, false, false, false, false]),
            (Role::Node, [false, true, false, true, false]),
            (Role::Admin, [true, true, true, false, false]),
            (Role::ReadOnly, [true, true, false, false, false]),
            (Role::Export, [false, false, false, false, false]),
            (Role::Client, [false, false, false, false, false]),
        ] {
            let who = Identity { name: "a".to_owned(), role };
            let found = calls.map(|call| check(&who, call).is_ok());
            assert_eq!(found, may, "{who}");
        }
    }

    #[test]
    fn a_refusal_says_who_what_and_the_way_out() {
        let node = Identity { name: "a".to_owned(), role: Role::Node };
        let error = check(&node, Call::Order).expect_err("refused").to_string();
        assert_eq!(
            error,
            "node `a` may not give orders: that takes a certificate of the role admin"
        );
        let error = check(&node, Call::Be("b")).expect_err("refused").to_string();
        assert!(error.contains("node `a`") && error.contains("node `b`"), "{error}");
    }

    #[test]
    fn what_no_line_names_nobody_may() {
        assert_eq!(call_of(&Method::PUT, "/v1/status", ""), None);
        assert_eq!(call_of(&Method::GET, "/v2/anything", ""), None);
    }
}
