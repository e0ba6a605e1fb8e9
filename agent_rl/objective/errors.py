"""The error for input that the objective rejects, with a machine-readable code."""


class ObjectiveError(ValueError):
    """Input the objective cannot use. `code` is stable, the sentence says where and what to do.

    Codes: nonfinite, positive_logp, empty_active_set, shape_mismatch, bad_alpha, missing_mut (no proximal log-probs),
    missing_ref, missing_field, missing_turn, active_token_without_turn, sampled_token_outside_mask, repeated_in_mask,
    duplicate_expert, split_trajectory, group_of_one, bad_method.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
