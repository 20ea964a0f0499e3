//! How models mark their reasoning. Derived from their chat templates.

/// The tags around the reasoning at the beginning of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThinkTags {
    /// The tag before the reasoning. Some templates write it at the end of the prompt.
    pub open: &'static str,
    /// The tag after the reasoning.
    pub close: &'static str,
}

/// Known tags: those of DeepSeek, Qwen and most other models; Mistral's; ByteDance's.
const TAGS: [ThinkTags; 3] = [
    ThinkTags { open: "<think>", close: "</think>" },
    ThinkTags { open: "[THINK]", close: "[/THINK]" },
    ThinkTags { open: "<seed:think>", close: "</seed:think>" },
];

impl ThinkTags {
    /// Returns the tags that a template contains, if any.
    pub fn of(template: &str) -> Option<ThinkTags> {
        TAGS.into_iter().find(|tags| template.contains(tags.close))
    }
}

/// Returns true if a template has the form of gpt-oss, whose replies are messages in channels.
pub fn has_channels(template: &str) -> bool {
    template.contains("<|channel|>") && template.contains("<|message|>")
}

/// Returns true if a template's model can reason before it answers.
pub fn thinks(template: &str) -> bool {
    has_channels(template) || ThinkTags::of(template).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_tell_how_their_models_think() {
        let open = |template: &str| ThinkTags::of(template).map(|tags| tags.open);
        assert_eq!(open("{{ content.split('</think>')[-1] }}"), Some("<think>"));
        assert_eq!(open("[THINK]{{ x }}[/THINK]"), Some("[THINK]"));
        assert_eq!(open("<|im_start|>"), None);
        assert!(thinks("<|start|>assistant<|channel|>final<|message|>") && !thinks("{{ messages }}"));
    }
}
