//! Finds the route that a client probably meant.

use http::Method;

/// Paths that are less alike than this are not suggested. `/v1/message` and `/v1/models` have 0.73.
const MIN_LIKENESS: f64 = 0.75;

/// The most for a path without its first segments. A typing error in the whole path is more probable.
const MAX_LIKENESS_OF_END: f64 = 0.9;

/// The route whose path is most like the requested one, and among those with that path the one with its method. `None`
/// if no path is like it. A route is `METHOD PATH`.
///
/// Most wrong paths come from a wrong base URL, which repeats or omits the beginning of a path. So two paths are also alike
/// if one ends with the other.
pub(in crate::http) fn nearest_route<'a>(method: &Method, path: &str, routes: &'a [String]) -> Option<&'a str> {
    let wanted = path.trim_matches('/').to_ascii_lowercase();
    let score = |route: &str| {
        let (of_route, path) = route.split_once(' ')?;
        let likeness = likeness(&wanted, path.trim_matches('/'))?;
        Some((likeness, of_route == method.as_str()))
    };
    let scored = routes.iter().filter_map(|route| Some((score(route)?, route)));
    let nearest = scored
        .max_by(|((one, is_method), _), ((other, is_others), _)| one.total_cmp(other).then(is_method.cmp(is_others)));
    nearest.map(|(_, route)| route.as_str())
}

/// From [`MIN_LIKENESS`] to 1; `None` below.
fn likeness(wanted: &str, path: &str) -> Option<f64> {
    if path.is_empty() || wanted.is_empty() {
        return None;
    }
    let letters = strsim::normalized_levenshtein(wanted, path);
    let most = match (ends_with(path, wanted), ends_with(wanted, path)) {
        (true, _) => Some(1.0),
        (false, true) => Some(MAX_LIKENESS_OF_END),
        (false, false) => None,
    };
    // Among such paths, the one that shares more wins.
    let shared = wanted.len().min(path.len()) as f64 / wanted.len().max(path.len()) as f64;
    let likeness = most.map_or(letters, |most| letters.max(MIN_LIKENESS + (most - MIN_LIKENESS) * shared));
    (likeness >= MIN_LIKENESS).then_some(likeness)
}

/// Returns true if `path` ends with all segments of `end`.
fn ends_with(path: &str, end: &str) -> bool {
    path.strip_suffix(end).is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_route_is_what_the_client_meant() {
        let routes = [
            "POST /v1/chat/completions",
            "POST /v1/completions",
            "POST /completion",
            "POST /v1/messages",
            "GET /v1/models",
            "GET /v1/models/{id}",
            "POST /api/chat",
            "GET /api/tags",
            "DELETE /api/delete",
            "GET /",
        ];
        let routes: Vec<String> = routes.map(str::to_owned).into();
        let check = |method: Method, path: &str, expected: Option<&str>| {
            assert_eq!(nearest_route(&method, path, &routes), expected, "{method} {path}");
        };
        check(Method::POST, "/chat/completions", Some("POST /v1/chat/completions"));
        check(Method::POST, "/v1/v1/chat/completions", Some("POST /v1/chat/completions"));
        check(Method::POST, "/openai/v1/chat/completions", Some("POST /v1/chat/completions"));
        check(Method::GET, "/v1/chat/completions/", Some("POST /v1/chat/completions"));
        check(Method::POST, "/v1/chat/completion", Some("POST /v1/chat/completions"));
        check(Method::POST, "/v1/CHAT/completions", Some("POST /v1/chat/completions"));
        check(Method::POST, "/completions", Some("POST /v1/completions"));
        check(Method::POST, "/v1/completion", Some("POST /v1/completions"));
        check(Method::POST, "/v1/message", Some("POST /v1/messages"));
        check(Method::GET, "/v1/model", Some("GET /v1/models"));
        check(Method::POST, "/v1/api/chat", Some("POST /api/chat"));
        check(Method::GET, "/tags", Some("GET /api/tags"));
        check(Method::GET, "/v1/images/generations", None);
        check(Method::GET, "/favicon.ico", None);
        check(Method::GET, "/v1", None);
        check(Method::GET, "//", None);
    }
}
